"""The noise behind `torch.multinomial`, drawn ahead of time without disturbing anybody.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)` from the default
generator of the device. Whoever knows the generator's state knows the noise of the positions to
come: a draft source may look at it, and propose what the target is likely to pick
(Daliri et al. 2024, arXiv 2408.07978).
"""

import threading
from collections.abc import Sequence

import torch

from hfspec.sampling.devices import generator_state, set_generator_state, spare_bytes

#: Bytes of noise that a call may keep on any machine: 436 rows of a vocabulary of 150,000.
_LEAST_BYTES = 256 << 20
#: Where there is more memory to spare, a call may keep this part of it.
_PART_OF_SPARE = 8
#: Between two calls that draw from one generator, in several threads.
_lock = threading.Lock()


class BatchNoise:
    """The noise of all draws of a call over `num_rows` rows, each of which comes to a draw at its own pace.

    Draws are counted from the call's beginning. A draw is one `[num_rows, vocab]` tensor for the whole batch,
    rows that have ended included, as in vanilla. The default generator moves on with the row that is furthest;
    what is ahead of it is seen by a private generator. If other code draws in between, what was seen ahead is
    stale and is dropped: the result is still vanilla's.

    Of each draw those rows are kept that have not come to it. Beyond a bound (`_LEAST_BYTES`, or a part of the
    memory to spare) what is needed last is let go, and drawn again from the generator's saved state.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._made = [0] * num_rows  # draws of each row
        self._at_work = dict.fromkeys(range(num_rows))  # rows that will draw; a set that keeps its order
        self._num_made = 0  # draws that the default generator has made
        self._num_seen = 0
        self._first = 0  # the first draw that some row at work has not made
        self._states: dict[int, torch.Tensor] = {}  # the generator's, before the draw of that number
        self._kept: list[dict[int, torch.Tensor]] = [{} for _ in range(num_rows)]  # of each row, by draw: `[vocab]`
        self._whole: dict[int, torch.Tensor] = {}  # draws whose rows still lie in one tensor
        self._num_kept = 0  # rows of noise in memory
        self._most_bytes: int | None = None
        self._kind = (0, torch.float32, torch.device("cpu"))  # of the noise: vocabulary, dtype, device
        self._private: torch.Generator | None = None

    def share(self, rows: Sequence[int] | None = None) -> "RowNoise":
        """The noise of these rows (of all), for whoever knows no others."""
        return RowNoise(self, list(range(self._num_rows)) if rows is None else list(rows))

    def peek(self, rows: Sequence[int], position: int, like: torch.Tensor) -> torch.Tensor:
        """Noise of the `position`-th (0, 1, …) draw from where each of the rows stands: `[len(rows), vocab]`.

        A draft that looks at position 0 first sees noise as new as can be; later positions follow from that.

        Args:
            like: its last dimension, dtype and device are the noise's.
        """
        self._fit(like)
        self._refresh(rows, position, is_new=position == 0)
        return self._noise_of(rows, [self._made[row] + position for row in rows])

    def ahead(self, rows: Sequence[int], count: int | Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Noise of the next `count` draws of each of the rows: `[len(rows), count, vocab]`.

        The generator is looked at once, and nothing waits for the device.

        Args:
            count: for all rows, or one each; behind a row's own count there are ones.
            like: its last dimension, dtype and device are the noise's.
        """
        counts = [count] * len(rows) if isinstance(count, int) else list(count)
        most = max(counts)
        self._fit(like)
        self._refresh(rows, most - 1, is_new=True)
        if len({self._made[row] for row in rows}) == 1 and min(counts) == most:
            first = self._made[rows[0]]
            noise = [self._noise_of(rows, [number] * len(rows)) for number in range(first, first + most)]
            return noise[0][:, None] if most == 1 else torch.stack(noise, dim=1)
        found: dict[tuple[int, int], torch.Tensor] = {}
        # By draws, not by rows: one that must be drawn again serves every row that asks.
        wanted = [
            (self._made[row] + index, row) for row, each in zip(rows, counts, strict=True) for index in range(each)
        ]
        for number in sorted({number for number, _ in wanted}):
            asking = [row for each, row in wanted if each == number]
            found |= zip(((row, number) for row in asking), self._each(asking, number), strict=True)
        nothing = torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
        flat = [found.get((row, self._made[row] + index), nothing) for row in rows for index in range(most)]
        return torch.stack(flat).view(len(rows), most, -1)

    def advance(self, rows: Sequence[int], nums: Sequence[int]) -> bool:
        """Say that the rows have made so many draws, of those that `ahead` showed; the generator moves on with them.

        Returns:
            Whether it holds. Not if other code, in another thread, has drawn since `ahead`: then nothing has
            happened, what was chosen is not vanilla's, and `ahead` shows other noise.
        """
        furthest = max(self._made[row] + num for row, num in zip(rows, nums, strict=True))
        if furthest > self._num_made:
            with _lock:
                if not torch.equal(self._states[self._num_made], generator_state(self._device)):
                    self._forget_ahead()
                    return False
                self._move(furthest)
        self._pass(rows, nums)
        return True

    def multinomial(self, probs: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """What these rows of the batch's next draw give for `probs` `[len(rows), vocab]` (float32): ids `[len(rows)]`.

        With all rows in step that is `torch.multinomial(probs, 1).squeeze(1)`. The rows have then made the draw.
        """
        self._fit(probs)
        furthest = max(self._made[row] for row in rows)
        is_unseen = furthest == self._num_made and self._num_made >= self._num_seen
        is_whole = len(rows) == self._num_rows and min(self._made[row] for row in rows) == furthest
        with _lock:
            if is_unseen and is_whole:
                self._forget_ahead()
                drawn = torch.multinomial(probs, num_samples=1).squeeze(1)
                self._num_made = self._num_seen = furthest + 1
            else:
                # The sum is finite unless a probability is nan or inf; then vanilla's own error is wanted.
                if not bool(probs.sum().isfinite()):
                    return torch.multinomial(probs, num_samples=1).squeeze(1)
                self._refresh(rows, 0, is_new=True)
                drawn = (probs / self._noise_of(rows, [self._made[row] for row in rows])).argmax(dim=-1)
                if furthest == self._num_made:
                    self._move(furthest + 1)
        self._pass(rows, [1] * len(rows))
        return drawn

    def end(self, row: int) -> None:
        """The row draws no more, so that nothing is kept for it."""
        self._at_work.pop(row, None)
        for number in list(self._kept[row]):
            self._drop(row, number)
        self._forget_passed()

    # What is known

    @property
    def _device(self) -> torch.device:
        return self._kind[2]

    def _fit(self, like: torch.Tensor) -> None:
        """Forget noise of another vocabulary, dtype or device."""
        kind = (like.shape[-1], like.dtype, like.device)
        if kind == self._kind:
            return
        for row, kept in enumerate(self._kept):
            for number in list(kept):
                self._drop(row, number)
        self._forget_ahead()
        self._kind, self._private, self._most_bytes = kind, None, None

    def _refresh(self, rows: Sequence[int], position: int, is_new: bool) -> None:
        """Forget what was seen ahead if the generator is not where it was left, and any row gets that far."""
        if max(self._made[row] for row in rows) + position < self._num_made:
            return
        known = self._states.get(self._num_made)
        if known is not None and not is_new:
            return
        now = generator_state(self._device)
        if known is None or not torch.equal(known, now):
            self._forget_ahead()
            self._states[self._num_made] = now

    def _noise_of(self, rows: Sequence[int], numbers: Sequence[int]) -> torch.Tensor:
        """Of each of the rows the noise of a draw, `[len(rows), vocab]`."""
        if len(set(numbers)) > 1:
            pairs = zip(rows, numbers, strict=True)
            return torch.stack([self._each([row], number)[0] for row, number in pairs])
        each = self._each(rows, numbers[0])
        whole = self._whole.get(numbers[0])
        if whole is not None and list(rows) == list(range(self._num_rows)):
            return whole
        return each[0][None] if len(each) == 1 else torch.stack(each)

    def _each(self, rows: Sequence[int], number: int) -> list[torch.Tensor]:
        """Of each of the rows the noise of that draw, `[vocab]`."""
        nearest = number if number in self._states else max(each for each in self._states if each < number)
        for between in range(nearest, number):
            self._draw(between)
        if all(number in self._kept[row] for row in rows):
            return [self._kept[row][number] for row in rows]
        noise = self._draw(number)
        return [noise[row] for row in rows]

    def _draw(self, number: int) -> torch.Tensor:
        """Draw the noise `[num_rows, vocab]` of a number whose state is known, and learn the state after it."""
        vocab_size, dtype, device = self._kind
        self._private = self._private or torch.Generator(device)
        self._private.set_state(self._states[number])
        noise = torch.empty(self._num_rows, vocab_size, dtype=dtype, device=device)
        noise.exponential_(1, generator=self._private)
        if number + 1 not in self._states:
            self._states[number + 1] = self._private.get_state()
        self._num_seen = max(self._num_seen, number + 1)
        self._keep(number, noise)
        return noise

    # What is kept

    def _keep(self, number: int, noise: torch.Tensor) -> None:
        """Keep the rows that are still to come to the draw and have lost it, or not had it."""
        lacking = [row for row in self._at_work if self._made[row] <= number and number not in self._kept[row]]
        if 2 * len(lacking) > self._num_rows and not any(number in kept for kept in self._kept):
            self._whole[number] = noise
            self._num_kept += self._num_rows
        else:
            self._num_kept += len(lacking)
        for row in lacking:
            self._kept[row][number] = noise[row] if number in self._whole else noise[row].clone()
        self._shrink(noise[0].nbytes)

    def _shrink(self, row_bytes: int) -> None:
        """Let go of what is needed last, which is far ahead of a row that is far behind, until few enough are kept."""
        if self._num_kept * row_bytes <= _LEAST_BYTES:
            return
        if self._most_bytes is None:
            self._most_bytes = max(_LEAST_BYTES, spare_bytes(self._device) // _PART_OF_SPARE)
        most = max(2 * self._num_rows, self._most_bytes // max(1, row_bytes))
        while self._num_kept > most:
            last = {row: next(reversed(kept)) for row, kept in enumerate(self._kept) if kept}
            row = max(last, key=lambda each: last[each] - self._made[each])
            self._split(last[row])
            self._drop(row, last[row])

    def _drop(self, row: int, number: int) -> None:
        """Let go of a row's noise; a draw that half of the rows have let go is kept by rows from then on."""
        if self._kept[row].pop(number, None) is None:
            return
        if number not in self._whole:
            self._num_kept -= 1
        elif 2 * sum(number in kept for kept in self._kept) <= self._num_rows:
            self._split(number)

    def _split(self, number: int) -> None:
        """Keep a draw by rows, so that each can be let go by itself."""
        if self._whole.pop(number, None) is None:
            return
        behind = [kept for kept in self._kept if number in kept]
        for kept in behind:
            kept[number] = kept[number].clone()
        self._num_kept += len(behind) - self._num_rows

    # How far rows and generator are

    def _move(self, num_made: int) -> None:
        """Let the default generator make draws that were seen."""
        set_generator_state(self._device, self._states[num_made])
        self._num_made = num_made

    def _pass(self, rows: Sequence[int], nums: Sequence[int]) -> None:
        """The rows have made so many draws: let go of them."""
        for row, num in zip(rows, nums, strict=True):
            for number in range(self._made[row], self._made[row] + num):
                self._drop(row, number)
            self._made[row] += num
        self._forget_passed()

    def _forget_passed(self) -> None:
        first = min((self._made[row] for row in self._at_work), default=self._num_made)
        for number in range(self._first, first):
            self._states.pop(number, None)
        self._first = max(self._first, first)

    def _forget_ahead(self) -> None:
        for number in range(self._num_made, self._num_seen + 1):
            self._states.pop(number, None)
            for row in range(self._num_rows):
                self._drop(row, number)
        self._num_seen = self._num_made


class RowNoise:
    """The noise of some rows of a batch, which are in step; made by `BatchNoise.share`."""

    def __init__(self, noise: BatchNoise, rows: list[int]) -> None:
        self._noise = noise
        self._rows = rows

    def peek(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """Noise of the `position`-th (0, 1, …) draw from where the rows stand: `[rows, vocab]`."""
        return self._noise.peek(self._rows, position, like)

    def multinomial(self, probs: torch.Tensor) -> torch.Tensor:
        """What the rows' next draw gives for `probs` `[rows, vocab]`: token ids `[rows]`."""
        return self._noise.multinomial(probs, self._rows)

    def end(self) -> None:
        """The rows draw no more."""
        for row in self._rows:
            self._noise.end(row)
