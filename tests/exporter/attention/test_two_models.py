"""Models that were given different attention in one process keep their own, in whatever order they are used."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import transformers

from hdexport.attention.attention_type import AttentionConversion, ConversionContext
from hdexport.attention.interface import use_operators
from hdexport.attention.registry import attention_conversions, attention_from_spec, attention_type_named
from hdexport.families import convertible_model_types, family_of
from hdruntime.bundle.manifest import Task
from support.tiny_models import BASE, VOCAB_SIZE, save_tiny_model

FAMILY = family_of("bert")

SPECS = {
    "a window": "window:3",
    "a wider one": "window:9,global:2,dilation:1/1/2/3",
    "blocks": "bigbird:block=2,random=0",
    "features": "favor:features=8",
    "other features": "favor:features=8,seed=1",
    "dense": None,
}

Model = transformers.PreTrainedModel


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Model]:
    """The same tiny BERT, each time a new one."""
    model = save_tiny_model(tmp_path_factory.mktemp("bert"), "bert", Task.FEATURE_EXTRACTION)
    return lambda: copy.deepcopy(model)


def states(model: Model) -> torch.Tensor:
    ids = torch.randint(5, VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(40) < torch.tensor([[40], [29]])).long()
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state


def conversions_of(model: Model, spec: str | None) -> dict[str, AttentionConversion]:
    context = ConversionContext(
        model=model,
        family=FAMILY,
        task=Task.FEATURE_EXTRACTION,
        max_len=BASE,
        convertible=convertible_model_types,
    )
    return attention_conversions(attention_from_spec(spec), context)


def with_operators(model: Model, spec: str | None) -> Model:
    """The model as it is traced."""
    for conversion in conversions_of(model, spec).values():
        conversion.adapt(model, FAMILY)
    use_operators(model)
    return model


def as_reference(model: Model, spec: str | None) -> Model:
    """The model that a bundle is compared with."""
    for name, conversion in conversions_of(model, spec).items():
        attention_type_named(name).use_reference(conversion, model, FAMILY)
    return model


@pytest.mark.parametrize("adapt", [with_operators, as_reference])
def test_models_of_other_attention_answer_as_they_did_before(
    new_model: Callable[[], Model], adapt: Callable[[Model, str | None], Model]
) -> None:
    """As they did before there were others: all there, one after the other, and alternating."""
    models, expected = {}, {}
    for name, spec in SPECS.items():
        models[name] = adapt(new_model(), spec)
        expected[name] = states(models[name])
    for name in [*models, *reversed(models), *models, *models]:
        assert torch.equal(states(models[name]), expected[name]), name
    for one, other in itertools.combinations(expected.values(), 2):
        assert (one - other).abs().max() > 0.01


def test_a_model_and_its_reference_agree_in_either_order(new_model: Callable[[], Model]) -> None:
    """And while models of other attention are asked between them."""
    traced = {name: with_operators(new_model(), spec) for name, spec in SPECS.items()}
    references = {name: as_reference(new_model(), spec) for name, spec in SPECS.items()}
    real = torch.arange(40) < torch.tensor([[40], [29]])
    for name, model in traced.items():
        torch.testing.assert_close(states(model)[real], states(references[name])[real], atol=2e-5, rtol=0)
    for name, model in reversed(references.items()):
        torch.testing.assert_close(states(model)[real], states(traced[name])[real], atol=2e-5, rtol=0)
