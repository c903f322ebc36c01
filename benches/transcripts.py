"""Transcripts as Claude Code writes them, of any size, the same for the same seed; gzip compresses them by a factor of four to five.

Words have natural frequencies, tool results are listings and code with repeated lines, IDs are random. So they compress like real
transcripts, line by line and as a whole.
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
    """Generates the lines of one session."""

    def __init__(self, session: str, seed: int = 1, cwd: str = "/work/app") -> None:
        self.session, self.cwd, self.rng = session, cwd, random.Random(seed)
        self.parent, self.clock, self.turn = None, 1_790_000_000_000, 0
        words = {"".join(self.rng.choices(SYLLABLES, k=self.rng.randint(1, 4))) for _ in range(4000)}
        self.words = sorted(words)
        self.rng.shuffle(self.words)
        # Zipf's law, flattened at its head.
        self.weights = list(accumulate(1 / (rank + 40) for rank in range(len(self.words))))

    def lines(self) -> Iterator[bytes]:
        while True:
            self.turn += 1
            for record in self._turn():
                yield json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    def bytes(self, size: int) -> Iterator[bytes]:
        """Yields complete lines of at least `size` bytes in total."""
        for line in self.lines():
            yield line
            size -= len(line)
            if size <= 0:
                return

    def text(self, count: int) -> str:
        return " ".join(self.rng.choices(self.words, cum_weights=self.weights, k=count))

    def code(self, count: int) -> str:
        """Returns lines as in a file or a log. Some are repeated, because agents read files repeatedly."""
        lines = []
        for _ in range(count):
            if len(lines) > 6 and self.rng.random() < 0.15:
                lines.append(self.rng.choice(lines))
                continue
            words = self.rng.choices(self.words, cum_weights=self.weights, k=4)
            lines.append(self.rng.choice(CODE).format(words[0], words[1], words[2], self.rng.randint(0, 9999), words[3]))
        return "\n".join(lines)

    def _id(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def _line(self, kind: str, **more) -> dict:
        self.clock += self.rng.randint(30, 9000)
        seconds, millis = divmod(self.clock, 1000)
        days, rest = divmod(seconds - 1_790_000_000, 86_400)
        at = f"2026-10-{1 + days % 28:02}T{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}.{millis:03}Z"
        own = self._id()
        line = {"parentUuid": self.parent, "isSidechain": False, "type": kind, **more, "uuid": own, "timestamp": at, "userType": "external"}
        line |= {"entrypoint": "sdk-cli", "cwd": self.cwd, "sessionId": self.session, "version": "2.1.325", "gitBranch": "main"}
        self.parent = own
        return line

    def _message(self, response: str, content: dict, stop: str) -> dict:
        usage = {"input_tokens": self.rng.randint(1, 400), "cache_creation_input_tokens": self.rng.randint(0, 9000)}
        usage |= {"cache_read_input_tokens": self.rng.randint(9000, 190_000), "output_tokens": self.rng.randint(20, 2000)}
        usage |= {"service_tier": "standard", "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0}}
        message = {"id": response, "type": "message", "role": "assistant", "model": MODEL, "content": [content]}
        message |= {"stop_reason": stop, "stop_sequence": None, "usage": usage}
        return self._line("assistant", message=message, requestId=f"req_{self.rng.getrandbits(96):024x}")

    def _turn(self) -> Iterator[dict]:
        prompt = self.text(self.rng.randint(8, 60))
        yield {"type": "queue-operation", "operation": "enqueue", "timestamp": "2026-10-01T00:00:00.000Z", "sessionId": self.session}
        yield self._line("user", message={"role": "user", "content": [{"type": "text", "text": prompt}]}, promptId=self._id())
        for _ in range(self.rng.randint(2, 9)):
            response = f"msg_{self.rng.getrandbits(96):024x}"
            if self.rng.random() < 0.5:
                # Thinking is signed; a signature does not compress.
                signature = f"{self.rng.getrandbits(1200):0300x}"
                yield self._message(response, {"type": "thinking", "thinking": self.text(self.rng.randint(20, 150)), "signature": signature}, "tool_use")
            tool = f"toolu_{self.rng.getrandbits(96):024x}"
            name, given = self._tool()
            yield self._message(response, {"type": "tool_use", "id": tool, "name": name, "input": given}, "tool_use")
            # A result is stored twice: for the model, and its end for the screen.
            output = self.code(self.rng.choice([3, 12, 40, 90, 160]))
            result = {"tool_use_id": tool, "type": "tool_result", "content": output, "is_error": False}
            shown = {"stdout": output[-3000:], "stderr": "", "interrupted": False, "isImage": False}
            yield self._line("user", message={"role": "user", "content": [result]}, toolUseResult=shown)
        response = f"msg_{self.rng.getrandbits(96):024x}"
        yield self._message(response, {"type": "text", "text": self.text(self.rng.randint(30, 300))}, "end_turn")
        yield {"type": "last-prompt", "lastPrompt": prompt, "leafUuid": self.parent, "sessionId": self.session}

    def _tool(self) -> tuple[str, dict]:
        path = f"{self.cwd}/src/{self.rng.choice(self.words[:60])}.rs"
        kind = self.rng.choice(["Bash", "Read", "Edit"])
        if kind == "Bash":
            return kind, {"command": f"grep -rn {self.rng.choice(self.words)} src | head -{self.rng.randint(5, 90)}", "description": self.text(5)}
        if kind == "Read":
            return kind, {"file_path": path, "offset": self.rng.randint(1, 900), "limit": 160}
        return kind, {"file_path": path, "old_string": self.code(6), "new_string": self.code(7), "replace_all": False}
