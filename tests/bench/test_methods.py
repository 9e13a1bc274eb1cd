"""Methods: what each sets, and that nothing of it stays behind."""

from collections.abc import Iterator

import pytest
import torch

from hfspec import DraftBudget
from hfspec.bench.errors import BenchError
from hfspec.bench.methods import NAMES, Method, build, parse_names
from hfspec.bench.models import Pair, Sampling, load_pair


@pytest.fixture(scope="module")
def pair(pair_folders: tuple[str, str]) -> Pair:
    return load_pair(*pair_folders, torch.float32)


@pytest.fixture
def methods(pair: Pair) -> Iterator[dict[str, Method]]:
    with pair.choosing_by(Sampling()):
        yield {method.name: method for method in build(NAMES, pair, DraftBudget.parse(3))}


def _generate(method: Method, num_tokens: int = 12) -> torch.Tensor:
    ids = torch.arange(1, 9).unsqueeze(0)
    return method.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)


def test_all_methods_give_plains_tokens(methods: dict[str, Method]) -> None:
    plain = _generate(methods["plain"])
    for method in methods.values():
        assert torch.equal(_generate(method), plain), method.name


def test_no_method_runs_the_processors_of_the_models_own_config(pair: Pair) -> None:
    assert pair.target.generation_config.repetition_penalty == 1.5
    with pair.choosing_by(Sampling()):
        assert pair.target.generation_config.repetition_penalty in (None, 1.0)
        assert pair.target.generation_config.eos_token_id is not None
    assert pair.target.generation_config.repetition_penalty == 1.5


def test_sampling_sets_the_temperature_and_nothing_else(pair: Pair) -> None:
    with pair.choosing_by(Sampling(temperature=0.5)):
        config = pair.target.generation_config
        assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.5, 0, 1.0)


def test_assisted_settings_reach_the_draft_and_are_taken_back(pair: Pair, methods: dict[str, Method]) -> None:
    before = pair.draft.generation_config
    seen = []
    generate = type(pair.draft).generate

    def spy(self: object, *args: object, **kwargs: object) -> object:
        config = pair.draft.generation_config
        seen.append((config.num_assistant_tokens, config.num_assistant_tokens_schedule))
        return generate(self, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.draft, "generate", spy.__get__(pair.draft), raising=False)
        _generate(methods["hf-assisted-constant"])
    assert set(seen) == {(5, "constant")}
    assert pair.draft.generation_config is before


def test_what_the_heuristic_learns_stays_with_it(pair: Pair, methods: dict[str, Method]) -> None:
    heuristic = methods["hf-assisted-heuristic"]
    before = heuristic.draft_defaults.num_assistant_tokens
    _generate(heuristic, 24)
    assert heuristic.draft_defaults.num_assistant_tokens != before
    assert methods["hf-assisted-constant"].draft_defaults.num_assistant_tokens == 5


def test_only_hfspec_has_metrics(methods: dict[str, Method]) -> None:
    for method in methods.values():
        _generate(method)
    assert {name for name, method in methods.items() if method.last_metrics is not None} == {"hfspec"}


def test_plain_is_always_run() -> None:
    assert parse_names("hfspec") == ["plain", "hfspec"]
    assert parse_names("hfspec, hf-assisted,plain") == ["plain", "hf-assisted", "hfspec"]


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(BenchError, match=r"'vllm'.*hf-assisted"):
        parse_names("plain,vllm")
