"""Attention modules are found anew for each watch, because a model may change between two."""

import copy
import gc
import weakref

import torch

import attnscope
from attnscope.interception import sites
from attnscope.interception.sites import Site
from families import VOCABULARY, build

IDS = torch.randint(5, VOCABULARY, (1, 9))


@torch.no_grad()
def test_a_layer_added_after_a_watch_is_measured() -> None:
    model = build("qwen2")
    with attnscope.watch(model) as before:
        model(IDS)
    added = copy.deepcopy(model.model.layers[0])
    added.self_attn.layer_idx = len(model.model.layers)
    model.model.layers.append(added)
    model.config.num_hidden_layers += 1
    model.config.layer_types = [*model.config.layer_types, model.config.layer_types[0]]
    with attnscope.watch(model) as after:
        model(IDS)
    assert before.layers == [0, 1, 2]
    assert after.layers == [0, 1, 2, 3]
    assert after.count(3).tolist() == [9.0]


def test_a_renumbered_layer_has_its_new_number() -> None:
    model = build("qwen2")
    assert sites.find(model).layers == [0, 1, 2]
    for layer in model.model.layers:
        layer.self_attn.layer_idx += 5
    assert sites.find(model).layers == [5, 6, 7]


def test_a_replaced_module_takes_the_site_of_the_old_one() -> None:
    model = build("qwen2")
    old = model.model.layers[1].self_attn
    assert sites.find(model).modules[old] == Site("decoder", 1)
    model.model.layers[1].self_attn = new = copy.deepcopy(old)
    found = sites.find(model)
    assert old not in found.modules
    assert found.modules[new] == Site("decoder", 1)


def test_finding_sites_does_not_keep_a_model_alive() -> None:
    model = build("qwen2")
    sites.find(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
