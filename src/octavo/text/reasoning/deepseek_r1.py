"""DeepSeek R1, its distillations, QwQ, MiniMax M2 and others that always think."""

from octavo.text.reasoning.think_tags import ThinkTags


class DeepSeekR1(ThinkTags):
    name = "deepseek_r1"
    aliases = ("minimax_m2",)

    def matches(self, template: str) -> bool:
        return "<think>" in template and "</think>" in template
