"""Folders of tiny models; `attnscope.zoo` lists them."""
