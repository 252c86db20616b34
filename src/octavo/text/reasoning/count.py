"""How many tokens of an answer are reasoning: those between the markers, counted as they come."""

from collections.abc import Callable, Iterable

from octavo.constraints import Thinking


class ReasoningCount:
    """Of one choice. `count`: so far, without the tokens of markers.

    thinking: the markers, and whether the answer begins in reasoning. token_bytes: of the
    tokenizer's tokens. recurs: whether reasoning may begin anywhere; else with the first word or
    not at all. calls: a token that begins tool calls, and so ends reasoning.
    """

    def __init__(
        self,
        thinking: Thinking,
        token_bytes: Callable[[int], bytes],
        recurs: bool,
        calls: int | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._begin, self._end = (
            b"".join(map(token_bytes, ids)) for ids in (thinking.begin, thinking.end)
        )
        self._ids = {self._begin: thinking.begin, self._end: thinking.end}
        self._recurs, self._calls = recurs, calls
        self._inside = thinking.inside
        self._over = not thinking.inside and not thinking.begin
        self._tail = b""  # of the text since the last marker, as much as may begin one
        self._sizes: list[int] = []  # of the tokens that `_tail` is of
        self.count = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """The answer gains tokens."""
        for token_id in token_ids:
            if self._over:
                return
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        if self._inside and token_id == self._calls:
            self._toggle()
            return
        marker = self._end if self._inside else self._begin
        data = self._token_bytes(token_id)
        ids = self._ids[marker]
        if len(ids) == 1:
            found, before = ids[0] == token_id, 0
        else:
            text = self._tail + data
            at = text.find(marker)
            found, before = at >= 0, self._tokens(len(self._tail) - at)
        if found:
            self.count -= before if self._inside else 0
            self._toggle()
            return
        self.count += self._inside
        if not self._inside and not self._recurs and not self._may_begin(data):
            self._over = True
        self._keep(data, len(marker) - 1)

    def _toggle(self) -> None:
        """A marker was found: reasoning begins or ends."""
        self._over = self._inside and not self._recurs
        self._inside = not self._inside
        self._tail, self._sizes = b"", []

    def _tokens(self, size: int) -> int:
        """How many of the last tokens have the last `size` bytes."""
        count = 0
        while size > 0 and count < len(self._sizes):
            count += 1
            size -= self._sizes[-count]
        return count

    def _may_begin(self, data: bytes) -> bool:
        text = (self._tail + data).lstrip()
        return self._begin.startswith(text)

    def _keep(self, data: bytes, most: int) -> None:
        self._tail = (self._tail + data)[-most:] if most > 0 else b""
        self._sizes.append(len(data))
        while self._sizes and sum(self._sizes[1:]) >= len(self._tail):
            del self._sizes[0]
