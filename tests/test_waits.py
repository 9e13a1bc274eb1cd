"""How often a round waits for the device: counted on the CPU, by what would have to wait on another."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationMixin, LogitsProcessor, StoppingCriteria

import hfspec
from hfspec.loop import Loop
from tests.models import OnForward, build, char_tokenizer, noisy, prompts

#: Where some releases (4.57) look at a position before each forward, in vanilla's calls as in ours.
HOSTS_LOOK = "_cache_dependant_input_preparation"
#: Functions and methods that need on the host what a device has made, or make the host's numbers known to it.
WAITING = {
    "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "equal",
    "nonzero", "argwhere", "masked_select", "tensor", "as_tensor", "is_nonzero", "allclose", "unique",
}  # fmt: skip


class Waits(TorchFunctionMode):
    """Counts what waits, outside of models' forwards."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.is_on and self._waits(name, args, kwargs or {}):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _waits(name: str, args: Any, kwargs: Any) -> bool:
        if name in ("__getitem__", "__setitem__"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in indices)
        if name == "where" and len(args) == 1:
            return True
        if name in ("tensor", "as_tensor"):  # of a tensor it is nothing, and what stays on the host is no wait
            return not isinstance(args[0], torch.Tensor) and kwargs.get("device") is not None
        is_state = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.uint8
        return name in WAITING and not is_state  # a generator's state is the host's


class Waited(NamedTuple):
    """A round: tokens committed by the row that has most, and what waited."""

    num_committed: int
    seen: list[str]


def waits_by_round(monkeypatch: pytest.MonkeyPatch, num_rows: int, call: dict[str, Any]) -> list[Waited]:
    """What waited in each round of a call in which nothing begins or ends."""
    model, draft = build(attn="sdpa", dtype=torch.float32), copy.deepcopy(noisy(attn="sdpa")).to(torch.float32)
    waits: Waits = Waits()
    rounds: list[Waited] = []
    honest = Loop._round

    def counted(self: Loop) -> None:
        waits.seen, before = [], list(self.texts.lengths)
        honest(self)
        if len(self.texts.rows) == len(before) and not any(self.texts.has_ended):
            grown = max(now - was for now, was in zip(self.texts.lengths, before, strict=True))
            rounds.append(Waited(grown, waits.seen))

    monkeypatch.setattr(Loop, "_round", counted)
    if hasattr(GenerationMixin, HOSTS_LOOK):
        looks = getattr(GenerationMixin, HOSTS_LOOK)

        def uncounted(self: Any, *args: Any, **kwargs: Any) -> Any:
            waits.is_on = False
            try:
                return looks(self, *args, **kwargs)
            finally:
                waits.is_on = True

        monkeypatch.setattr(GenerationMixin, HOSTS_LOOK, uncounted)
    watched = [
        OnForward(each, lambda *_: setattr(waits, "is_on", False), lambda *_: setattr(waits, "is_on", True))
        for each in (model, draft)
    ]
    lengths = [7] if num_rows == 1 else [7, 3, 9, 5, 8, 4, 6, 7][:num_rows]
    with hfspec.patched(model, draft, draft_budget=4):
        model.generate(**prompts(*lengths), **call)  # proves, and makes caches of facts
        rounds.clear()
        with waits:
            model.generate(**prompts(*lengths), **call)
    for each in watched:
        each.remove()
    return rounds[2:]


class Heard:
    """A streamer, which is handed what is the host's."""

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"

    def end(self) -> None:
        """Nothing to do."""


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "seeded": {"do_sample": True, "temperature": 1.2, "top_k": 20},
    "with an end": {"do_sample": False, "eos_token_id": [95, 96], "pad_token_id": 0, "suppress_tokens": [95, 96]},
    "with a stop string": {"do_sample": False, "stop_strings": ["qqqzzz"], "tokenizer": char_tokenizer()},
    "looking at the text": {"do_sample": False, "repetition_penalty": 1.3},
    "both": {"do_sample": True, "repetition_penalty": 1.3, "top_p": 0.9},
    "in step": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_round_waits_once(monkeypatch, call, num_rows):
    """For the verdict; the rest of a round is known to the host, or stays on the device."""
    rounds = waits_by_round(monkeypatch, num_rows, call | {"max_new_tokens": 60})
    assert len(rounds) > 4
    assert [len(seen) for _, seen in rounds] == [1] * len(rounds), rounds


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
def test_a_streamer_is_served_afterwards(monkeypatch, do_sample):
    """From what the host has read: it costs no wait."""
    call = {"do_sample": do_sample, "max_new_tokens": 60, "streamer": Heard()}
    rounds = waits_by_round(monkeypatch, 1, call)
    assert [len(seen) for _, seen in rounds] == [1] * len(rounds), rounds


class Same(LogitsProcessor):
    """Somebody's own."""

    def __call__(self, input_ids, scores):
        return scores


class Never(StoppingCriteria):
    """Somebody's own."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


OWN = {"a processor": {"logits_processor": [Same()]}, "a criterion": {"stopping_criteria": [Never()]}}


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_the_users_own_objects_are_waited_for_once_a_token(monkeypatch, own, num_rows):
    """They are served token by token, as in vanilla, but all rows together; the draft is read on the way."""
    rounds = waits_by_round(monkeypatch, num_rows, own | {"do_sample": False, "max_new_tokens": 60})
    assert [len(seen) for _, seen in rounds] == [num for num, _ in rounds], rounds
    assert num_rows > 1 or max(num for num, _ in rounds) > 1, "the control: several tokens in a round"


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_draw_for_the_users_own_objects_is_looked_at_before(monkeypatch, num_rows):
    """Once more a token: as in vanilla, probabilities that are none raise before anything is drawn or written."""
    call = {"do_sample": True, "max_new_tokens": 60, "logits_processor": [Same()]}
    rounds = waits_by_round(monkeypatch, num_rows, call)
    assert all(len(seen) <= 2 * num for num, seen in rounds), rounds


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device to wait for")
def test_nothing_else_waits_on_a_device(monkeypatch):
    """Torch itself finds what synchronises, but for the one copy of a round's verdict."""
    from hfspec.accept import vectorised

    model, draft = (build(attn="sdpa", dtype=torch.float32).to("cuda") for _ in range(2))
    honest = vectorised._on_host

    def allowed(**parts):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return honest(**parts)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(vectorised, "_on_host", allowed)
    rounds = Loop._round
    number = 0

    def watched(self):
        nonlocal number
        number += 1
        torch.cuda.set_sync_debug_mode("error" if number > 3 else "default")
        try:
            rounds(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    inputs = {name: value.to("cuda") for name, value in prompts(7).items()}
    with hfspec.patched(model, draft, draft_budget=4):
        model.generate(**inputs, do_sample=False, max_new_tokens=40)
        monkeypatch.setattr(Loop, "_round", watched)
        model.generate(**inputs, do_sample=False, max_new_tokens=40)
