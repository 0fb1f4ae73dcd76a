"""What a model is made to do while it runs: attention cut or steered, activations moved.

Each is a `with` block that leaves the model as it was. Must not know what is measured, or why.
"""
