"""Transcripts as Claude Code writes them, of any size, the same for the same seed; gzip makes them four to five times smaller.

Text is made of words that become rarer, tool results are listings and code whose lines come back changed, ids are random: what a real
transcript compresses like, line by line and as a whole.
"""

import json
import random
import uuid
from collections.abc import Iterator
from itertools import accumulate

MODEL = "claude-opus-5-5"
SYLLABLES = """ba be bo ca ce co da de di do fa fe fi ga ge go ha he in io ka ke la le li lo ma me mi mo na ne no pa pe po ra re ri ro
    sa se si so ta te ti to un va ve""".split()
CODE = [
    "    let {0} = self.{1}.{2}({3})?;",
    "    if {0}.{1}() < {3} {{",
    "        return Err({0}::{1}({3}));",
    "    }}",
    "pub fn {0}({1}: &str, {2}: u64) -> Result<{4}> {{",
    "        self.{0}.insert({1}.clone(), {3});",
    "    for {0} in {1}.iter().filter(|{2}| {2}.len() > {3}) {{",
    '    assert_eq!({0}.{1}, {3}, "{2} {4}");',
    "    // {0} {1} {2}, because {4} {0}",
    "{3}:{0}_{1}.rs: {2} {4}",
]


class Transcript:
    """Lines of one session, without end."""

    def __init__(self, session: str, seed: int = 1, cwd: str = "/work/app") -> None:
        self.session, self.cwd, self.dice = session, cwd, random.Random(seed)
        self.parent, self.clock, self.turn = None, 1_790_000_000_000, 0
        words = {"".join(self.dice.choices(SYLLABLES, k=self.dice.randint(1, 4))) for _ in range(4000)}
        self.words = sorted(words)
        self.dice.shuffle(self.words)
        # By Zipf, flattened at its head.
        self.weights = list(accumulate(1 / (rank + 40) for rank in range(len(self.words))))

    def lines(self) -> Iterator[bytes]:
        while True:
            self.turn += 1
            for record in self._turn():
                yield json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    def bytes(self, size: int) -> Iterator[bytes]:
        """Whole lines until there are `size` bytes or a little more."""
        for line in self.lines():
            yield line
            size -= len(line)
            if size <= 0:
                return

    def text(self, count: int) -> str:
        return " ".join(self.dice.choices(self.words, cum_weights=self.weights, k=count))

    def code(self, count: int) -> str:
        """Lines as a file or a log has them: some of them were there before, as files are read again and again."""
        made = []
        for _ in range(count):
            if len(made) > 6 and self.dice.random() < 0.15:
                made.append(self.dice.choice(made))
                continue
            words = self.dice.choices(self.words, cum_weights=self.weights, k=4)
            made.append(self.dice.choice(CODE).format(words[0], words[1], words[2], self.dice.randint(0, 9999), words[3]))
        return "\n".join(made)

    def _id(self) -> str:
        return str(uuid.UUID(int=self.dice.getrandbits(128), version=4))

    def _line(self, kind: str, **more) -> dict:
        self.clock += self.dice.randint(30, 9000)
        seconds, millis = divmod(self.clock, 1000)
        days, rest = divmod(seconds - 1_790_000_000, 86_400)
        at = f"2026-10-{1 + days % 28:02}T{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}.{millis:03}Z"
        own = self._id()
        line = {"parentUuid": self.parent, "isSidechain": False, "type": kind, **more, "uuid": own, "timestamp": at, "userType": "external"}
        line |= {"entrypoint": "sdk-cli", "cwd": self.cwd, "sessionId": self.session, "version": "2.1.325", "gitBranch": "main"}
        self.parent = own
        return line

    def _said(self, answer: str, content: dict, stop: str) -> dict:
        usage = {"input_tokens": self.dice.randint(1, 400), "cache_creation_input_tokens": self.dice.randint(0, 9000)}
        usage |= {"cache_read_input_tokens": self.dice.randint(9000, 190_000), "output_tokens": self.dice.randint(20, 2000)}
        usage |= {"service_tier": "standard", "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0}}
        message = {"id": answer, "type": "message", "role": "assistant", "model": MODEL, "content": [content]}
        message |= {"stop_reason": stop, "stop_sequence": None, "usage": usage}
        return self._line("assistant", message=message, requestId=f"req_{self.dice.getrandbits(96):024x}")

    def _turn(self) -> Iterator[dict]:
        prompt = self.text(self.dice.randint(8, 60))
        yield {"type": "queue-operation", "operation": "enqueue", "timestamp": "2026-10-01T00:00:00.000Z", "sessionId": self.session}
        yield self._line("user", message={"role": "user", "content": [{"type": "text", "text": prompt}]}, promptId=self._id())
        for _ in range(self.dice.randint(2, 9)):
            answer = f"msg_{self.dice.getrandbits(96):024x}"
            if self.dice.random() < 0.5:
                # A thought is signed; a signature does not compress.
                signature = f"{self.dice.getrandbits(1200):0300x}"
                yield self._said(answer, {"type": "thinking", "thinking": self.text(self.dice.randint(20, 150)), "signature": signature}, "tool_use")
            tool = f"toolu_{self.dice.getrandbits(96):024x}"
            name, given = self._tool()
            yield self._said(answer, {"type": "tool_use", "id": tool, "name": name, "input": given}, "tool_use")
            # What is kept both for the model and for the screen stands there twice; of a long one the screen keeps the end.
            output = self.code(self.dice.choice([3, 12, 40, 90, 160]))
            result = {"tool_use_id": tool, "type": "tool_result", "content": output, "is_error": False}
            shown = {"stdout": output[-3000:], "stderr": "", "interrupted": False, "isImage": False}
            yield self._line("user", message={"role": "user", "content": [result]}, toolUseResult=shown)
        answer = f"msg_{self.dice.getrandbits(96):024x}"
        yield self._said(answer, {"type": "text", "text": self.text(self.dice.randint(30, 300))}, "end_turn")
        yield {"type": "last-prompt", "lastPrompt": prompt, "leafUuid": self.parent, "sessionId": self.session}

    def _tool(self) -> tuple[str, dict]:
        path = f"{self.cwd}/src/{self.dice.choice(self.words[:60])}.rs"
        kind = self.dice.choice(["Bash", "Read", "Edit"])
        if kind == "Bash":
            return kind, {"command": f"grep -rn {self.dice.choice(self.words)} src | head -{self.dice.randint(5, 90)}", "description": self.text(5)}
        if kind == "Read":
            return kind, {"file_path": path, "offset": self.dice.randint(1, 900), "limit": 160}
        return kind, {"file_path": path, "old_string": self.code(6), "new_string": self.code(7), "replace_all": False}
