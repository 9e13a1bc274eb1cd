"""`Texts`: the rows' ids, prompt and committed tokens, in one buffer that grows without being copied for each token.

Knows nothing of models and drafts.
"""

import copy
from collections.abc import Sequence

import torch

from hfspec.rounds import Outcomes

#: Places added when the buffer is full: a quarter of what is there, at least so many.
_MIN_ROOM = 256


class Texts:
    """The texts of the rows at work.

    Args:
        prompts: `[rows, prompt_length]`, int64.

    Attributes:
        lengths: of each row at work, on the host; rows in step have one length.
        rows: which row of the batch each row at work is.
        has_ended: of each row at work, whether its text is over.
        num_prompt: the length all rows began with.
    """

    def __init__(self, prompts: torch.Tensor) -> None:
        num_rows, self.num_prompt = prompts.shape
        self.lengths = [self.num_prompt] * num_rows
        self.rows = list(range(num_rows))
        self.has_ended = [False] * num_rows
        #: Whether the whole text has been read by the target, for a token that is not chosen yet.
        self.is_pending = False
        self._finished: dict[int, torch.Tensor] = {}
        self._num_rows = num_rows
        self._buffer = prompts.new_zeros(num_rows, self.num_prompt + _MIN_ROOM)
        self._buffer[:, : self.num_prompt] = prompts
        # Where each row goes on, on the device; rows of one length need none.
        self._ends: torch.Tensor | None = None

    def copy(self) -> "Texts":
        """The same, for somebody who may write into it."""
        twin = copy.copy(self)
        twin.lengths, twin.rows, twin.has_ended = [*self.lengths], [*self.rows], [*self.has_ended]
        twin._finished = {row: text.clone() for row, text in self._finished.items()}
        twin._buffer = self._buffer.clone()
        twin._ends = None if self._ends is None else self._ends.clone()
        return twin

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self._buffer.device

    @property
    def num_new(self) -> int:
        """Committed tokens of the longest row at work."""
        return max(self.lengths) - self.num_prompt

    @property
    def are_even(self) -> bool:
        """Whether all rows have one length."""
        return self._ends is None

    def of(self, row: int) -> torch.Tensor:
        """The text of one row `[1, length]`: a view, which is never written into but by whoever it is handed to."""
        return self._buffer[row : row + 1, : self.lengths[row]]

    def together(self) -> torch.Tensor:
        """The texts of rows of one length, `[rows, length]`, as vanilla hands them on."""
        return self._buffer[:, : self.lengths[0]].contiguous()

    def put_back(self, texts: torch.Tensor) -> None:
        """Take over what somebody has written into what `together` gave."""
        self._buffer[:, : texts.shape[1]] = texts

    @property
    def num_committed(self) -> int:
        """Committed tokens of the row that has fewest."""
        return min(self.lengths) - self.num_prompt

    def ends(self, device: torch.device) -> torch.Tensor:
        """The lengths `[rows]` on a device."""
        return self._device_ends().to(device)

    def last(self, counts: Sequence[int], on_device: torch.Tensor | None = None) -> torch.Tensor:
        """The last `counts[i]` ids of each row, `[rows, most]`; rows with fewer are filled up behind with any ids.

        Args:
            on_device: `counts` on the device, `[rows]`, where somebody has them there.
        """
        most = max(counts)
        if self.are_even and min(counts) == most:
            return self._buffer[:, self.lengths[0] - most : self.lengths[0]]
        if min(counts) == most:
            first = self._device_ends()[:, None] - most
        else:
            known = torch.tensor(counts, device=self.device) if on_device is None else on_device.to(self.device)
            first = (self._device_ends() - known)[:, None]
        columns = first + torch.arange(most, device=self.device)
        return self._buffer.gather(1, columns.clamp_(max=self._buffer.shape[1] - 1))

    def ids(self, row: int, since: int) -> list[int]:
        """A row's ids from index `since` on, on the host."""
        found: list[int] = self.of(row)[0, since:].tolist()
        return found

    def append(self, tokens: torch.Tensor, row: int | None = None) -> None:
        """Commit one token: of every row, `tokens` `[rows]`, or of one row, `[1]`."""
        rows = slice(None) if row is None else slice(row, row + 1)
        length = self.lengths[0 if row is None else row]
        self._make_room(length + 1)
        self._buffer[rows, length] = tokens
        for each in range(len(self.lengths))[rows]:
            self.lengths[each] += 1
        if row is not None:
            self._ends = None if len(set(self.lengths)) == 1 else torch.tensor(self.lengths, device=self.device)

    def grow(self, tokens: torch.Tensor, outcomes: Outcomes) -> None:
        """Commit what `outcomes` say: the first of each row's `tokens` `[rows, most]`; the others may be anything."""
        width, counts = tokens.shape[1], outcomes.num_committed
        self._make_room(max(self.lengths) + width)
        if self.are_even:
            self._buffer[:, self.lengths[0] : self.lengths[0] + width] = tokens
        else:
            columns = self._device_ends()[:, None] + torch.arange(width, device=self.device)
            self._buffer.scatter_(1, columns, tokens)
        ends = self._device_ends() if len(counts) > 1 else None
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        is_even = len(set(self.lengths)) == 1
        self._ends = None if is_even or ends is None else ends + outcomes.num_committed_on(self.device)
        self.has_ended = [was or now.has_ended for was, now in zip(self.has_ended, outcomes.rows, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, counted among those at work; the others are kept as they are."""
        for row in set(range(len(self.rows))) - set(rows):
            self._finished[self.rows[row]] = self.of(row).clone()
        self._buffer = self._buffer[torch.tensor(rows, device=self.device)]
        self.rows = [self.rows[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.has_ended = [self.has_ended[row] for row in rows]
        is_even = len(set(self.lengths)) == 1
        self._ends = None if is_even else torch.tensor(self.lengths, device=self.device)

    def whole(self, pad_id: int) -> torch.Tensor:
        """All texts of the batch `[rows, longest]`, those that ended early filled up with `pad_id`."""
        texts = self._finished | {self.rows[row]: self.of(row) for row in range(len(self.rows))}
        longest = max(text.shape[1] for text in texts.values())
        whole = next(iter(texts.values())).new_full((self._num_rows, longest), pad_id)
        for row, text in texts.items():
            whole[row, : text.shape[1]] = text[0]
        return whole

    def behind(self) -> "Texts | None":
        """Of the rows of the batch those that are shorter than the longest, as they are, to be gone on with."""
        lengths = self.all_lengths()
        rows = [row for row, length in enumerate(lengths) if length < max(lengths)]
        if not rows:
            return None
        behind = Texts(self.whole(0)[rows])
        behind.num_prompt, behind.rows, behind._num_rows = self.num_prompt, rows, self._num_rows
        behind.lengths = [lengths[row] for row in rows]
        if len(set(behind.lengths)) > 1:
            behind._ends = torch.tensor(behind.lengths, device=self.device)
        return behind

    def all_lengths(self) -> list[int]:
        """The lengths of all texts of the batch."""
        lengths = {row: text.shape[1] for row, text in self._finished.items()}
        lengths |= dict(zip(self.rows, self.lengths, strict=True))
        return [lengths[row] for row in range(self._num_rows)]

    def _device_ends(self) -> torch.Tensor:
        if self._ends is None:
            return torch.full((len(self.lengths),), self.lengths[0], device=self.device)
        return self._ends

    def _make_room(self, length: int) -> None:
        capacity = self._buffer.shape[1]
        if length > capacity:
            room = length + max(_MIN_ROOM, length // 4)
            self._buffer = torch.nn.functional.pad(self._buffer, (0, room - capacity))
