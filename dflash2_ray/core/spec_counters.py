"""How much was drafted and accepted since the start, counted per request and verify step as vLLM does: before a stop or limit cuts."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecCounters:
    """Only ever grow. accepted_per_position[i]: steps that accepted more than i drafts. A step without drafts counts nothing."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @classmethod
    def of_width(cls, num_speculative_tokens: int) -> "SpecCounters":
        return cls(accepted_per_position=[0] * num_speculative_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step with drafts, bonus included; None where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def record(self, num_drafts: int, num_accepted: int, count: int = 1) -> None:
        """The parts of `count` requests in one verify step, which went alike."""
        if num_drafts == 0:
            return
        self.num_drafts += count
        self.num_draft_tokens += num_drafts * count
        self.num_accepted_tokens += num_accepted * count
        for position in range(num_accepted):
            self.accepted_per_position[position] += count
