"""Recognises text that gives instructions to a model, such as "ignore all previous instructions".

Such text comes from pages, mails and documents that a user passes on. It is not the user's word, so no fact about the
user is made of it. The patterns cover English, German, Spanish, Korean, Japanese and Chinese. They miss what is put
mildly, and a user who discusses such a text is taken for one who passes it on: its memory is then a quotation.

Called by consolidation and by the tool `remember`.
"""

from __future__ import annotations

from perdure.text.linear import normalized
from perdure.text.patterns import compiled

MAX_CHARS = 20_000
"""The most characters that are read."""

_INSTRUCTS = compiled(
    # to drop what the model was told
    r"\b(?:ignore|disregard|forget|override|bypass)\b[^.!?\n]{0,40}\b(?:instructions?|prompts?|rules|guidelines|directives"
    r"|everything (?:above|before)|(?:system|previous) messages?)\b"
    r"|\b(?:ignorier\pL*|vergiss|missachte\pL*|umgehe)\b[^.!?\n]{0,40}(?:anweisung|instruktion|vorgaben|regeln|prompt)"
    r"|\b(?:ignor\pL*|olvid\pL*|descart\pL*)\b[^.!?\n]{0,40}(?:instrucciones|indicaciones|reglas|prompt)"
    r"|(?:지시|명령|지침|프롬프트|규칙)\pL*[^.!?\n]{0,20}(?:무시|잊어|따르지)"
    r"|(?:指示|命令|プロンプト|ルール|規則)[^。\x{ff01}\x{ff1f}\n]{0,20}(?:無視|忘れ|従わ)"
    r"|(?:忽略|无视|無視|忘记|忘掉|不要理会)[^。\x{ff01}\x{ff1f}\n]{0,20}(?:指令|指示|提示|规则|規則|命令)"
    # to take another role, or to speak as the system or to the assistant
    r"|\byou are now (?:an?|the|in)\b|\b(?:new|updated) (?:system )?(?:instructions?|prompt)s?\s*:|\bsystem prompt\b"
    r"|(?:^|\n)\s*(?:\[?(?:system|inst|developer)\]?\s*:"
    r"|<\s*/?\s*(?:system|instructions?)\s*>|\[/?inst\]|###? ?(?:system|instruction))"
    r"|<\|(?:im_start|im_end|system|endoftext)\|>"
    r"|\b(?:to|for|attention|note to)\b[,:]? (?:the |all |any )?"
    r"(?:memory extractor|ai (?:assistant|agent|model)|assistant|language model|llm)s?\b[^.!?\n]{0,20}:"
    r"|\b(?:do not|don't|never) (?:tell|inform|mention (?:this|it) to|reveal (?:this|it) to) the user\b"
    r"|\b(?:remember|store|save|record|memorize)\b[^.!?\n]{0,30}\bthat the user\b"
    r"|\bmerke? dir\b[^.!?\n]{0,20}dass (?:der nutzer|die nutzerin|der benutzer)\b"
    r"|\brecuerda que (?:el usuario|la usuaria)\b|사용자\pL*[^.!?\n]{0,60}기억해|ユーザー[^。\n]{0,60}(?:と記憶|と覚え)"
    r"|(?:记住|記住)[^。\n]{0,8}用户",
    ignore_case=True,
)


def instructs(text: str) -> bool:
    """Whether `text` gives instructions to a model. Takes linear time."""
    return _INSTRUCTS.search(normalized("NFKC", text[:MAX_CHARS])) is not None
