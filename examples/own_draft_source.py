"""A draft source of your own, with no draft model: copy what followed these two tokens when they stood here last.

The whole protocol is below: a source starts a session for a call, which proposes and observes, round by round.

    python examples/own_draft_source.py
"""

import torch
import typer

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource, Outcome, RoundBudget
from hfspec.weights.fetch import load

CHAT = [{"role": "user", "content": "Rename x to n:\n\ntotal = 0\nfor x in xs:\n    total += x\nprint(total)"}]


class Copy(DraftSource):
    """Guesses: a wrong draft costs a little time and never a token. It serves all calls and remembers none."""

    def start(self, context: Context) -> DraftSession:
        """One session for each `generate()` call."""
        return CopySession(context)


class CopySession(DraftSession):
    """One call: proposes, and learns how far to trust its proposals."""

    def __init__(self, context: Context) -> None:
        self.device, self.trust = context.device, 0.5

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        """Copy what the text so far `[1, length]` had behind the last place with the same two tokens."""
        ids, copied = input_ids[0].tolist(), []
        start = next((end for end in range(len(ids) - 1, 1, -1) if ids[end - 2 : end] == ids[-2:]), len(ids))
        for token_id in ids[start : start + budget.num_tokens]:
            copied.append(token_id)
            if not budget.allows_another(self.trust):  # one more is not expected to pay
                break
        token_ids = torch.tensor([copied], dtype=torch.long, device=self.device)  # [1, 0]: a plain round
        return Draft(token_ids, confidences=(self.trust,) * len(copied))

    def observe(self, outcome: Outcome) -> None:
        """The verdict on that draft; behind the first rejected token nothing is judged."""
        self.trust = (1 + outcome.num_accepted) / (2 + outcome.num_judged)


def main(target: str = "Qwen/Qwen2.5-Coder-1.5B-Instruct", dtype: str = "bfloat16") -> tuple[list[int], hfspec.Stats]:
    """Generate with that source; returns all its ids and the counts."""
    model, tokenizer = load(target, getattr(torch, dtype), device_map="auto")
    hfspec.patch(model, draft=Copy())
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs.to(model.device), max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(ids[0], skip_special_tokens=True), hfspec.stats(model), sep="\n\n")
    return ids[0].tolist(), hfspec.stats(model)


if __name__ == "__main__":
    typer.run(main)
