//! Generated transcripts that resemble those of Claude Code.
//!
//! The lines have the same fields, the text has the word statistics of natural text, IDs and
//! signatures are incompressible, and a tool result occurs twice in its line. gzip compresses them
//! by a factor of four to five, as it does with real ones.

use super::rng::TestRng;

/// Generates one session, step by step.
pub struct Transcript {
    rng: TestRng,
    session: String,
    parent: Option<String>,
    milliseconds: u64,
    words: Vec<String>,
}

impl Transcript {
    pub fn new(seed: u64) -> Transcript {
        let mut rng = TestRng::new(seed);
        let words = (0..6000).map(|_| word(&mut rng)).collect();
        let session = uuid(&mut rng);
        Transcript {
            rng,
            session,
            parent: None,
            milliseconds: 1_777_636_800_000,
            words,
        }
    }

    /// Returns the lines that an agent appends within one flush: complete steps of at least
    /// `min_len` bytes.
    pub fn flush(&mut self, min_len: usize) -> String {
        let mut lines = String::new();
        while lines.len() < min_len {
            lines.push_str(&self.step());
        }
        lines
    }

    /// Returns one step: a line per block of the response, and the tool result.
    fn step(&mut self) -> String {
        let message = format!("msg_01{}", self.letters(22));
        let request = format!("req_011C{}", self.letters(20));
        let tool = format!("toolu_01{}", self.letters(22));
        let mut blocks = Vec::new();
        if self.rng.below(2) == 0 {
            let length = self.between(80, 500);
            let thinking = self.text(length);
            let length = self.between(270, 660);
            let signature = self.letters(length);
            blocks.push(format!(
                r#"{{"type":"thinking","thinking":"{thinking}","signature":"{signature}"}}"#
            ));
        }
        if self.rng.below(2) == 0 {
            let length = self.between(40, 300);
            blocks.push(format!(
                r#"{{"type":"text","text":"{}"}}"#,
                self.text(length)
            ));
        }
        let name = ["Bash", "Read", "Edit", "Grep"][self.rng.below(4) as usize];
        let length = self.between(20, 200);
        let (command, description) = (self.text(length), self.text(40));
        blocks.push(format!(
            r#"{{"type":"tool_use","id":"{tool}","name":"{name}","input":{{"command":"{command}","description":"{description}"}}}}"#
        ));
        let (created, read, output) = (
            self.rng.below(5000),
            self.rng.below(90_000),
            self.rng.below(900),
        );
        let usage = format!(
            r#"{{"input_tokens":4,"cache_creation_input_tokens":{created},"cache_read_input_tokens":{read},"cache_creation":{{"ephemeral_5m_input_tokens":{created},"ephemeral_1h_input_tokens":0}},"output_tokens":{output},"service_tier":"standard"}}"#
        );
        let mut lines = String::new();
        for block in blocks {
            lines.push_str(&self.line(
                "assistant",
                &format!(
                    r#""message":{{"model":"claude-sonnet-4-5-20250929","id":"{message}","type":"message","role":"assistant","content":[{block}],"stop_reason":null,"stop_sequence":null,"usage":{usage}}},"requestId":"{request}""#
                ),
            ));
        }
        // Most results are short, some are long.
        let length = (self.between(60, 700) << self.rng.below(4)).min(6000);
        let result = self.text(length);
        lines.push_str(&self.line(
            "user",
            &format!(
                r#""message":{{"role":"user","content":[{{"tool_use_id":"{tool}","type":"tool_result","content":"{result}","is_error":false}}]}},"toolUseResult":{{"stdout":"{result}","stderr":"","interrupted":false,"isImage":false}}"#
            ),
        ));
        lines
    }

    fn line(&mut self, kind: &str, rest: &str) -> String {
        let uuid = uuid(&mut self.rng);
        self.milliseconds += 100 + self.rng.below(9000);
        let parent = self
            .parent
            .replace(uuid.clone())
            .map_or("null".to_owned(), |parent| format!("\"{parent}\""));
        let time = jiff::Timestamp::from_millisecond(self.milliseconds as i64).unwrap();
        let session = &self.session;
        format!(
            "{{\"parentUuid\":{parent},\"isSidechain\":false,\"userType\":\"external\",\"cwd\":\"/work/app\",\"sessionId\":\"{session}\",\"version\":\"2.1.14\",\"gitBranch\":\"main\",\"type\":\"{kind}\",{rest},\"uuid\":\"{uuid}\",\"timestamp\":\"{time}\"}}\n"
        )
    }

    /// Returns words with natural frequencies.
    fn text(&mut self, length: usize) -> String {
        let mut text = String::new();
        while text.len() < length {
            // Uniform in the logarithm of the rank: Zipf's law.
            let rank =
                (self.words.len() as f64).powf(self.rng.below(1 << 20) as f64 / f64::from(1 << 20));
            text.push_str(&self.words[rank as usize - 1]);
            text.push(' ');
        }
        text.truncate(length);
        text
    }

    fn letters(&mut self, count: usize) -> String {
        const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-";
        (0..count)
            .map(|_| LETTERS[self.rng.below(64) as usize] as char)
            .collect()
    }

    fn between(&mut self, least: u64, most: u64) -> usize {
        (least + self.rng.below(most - least)) as usize
    }
}

fn word(rng: &mut TestRng) -> String {
    const HEADS: &[u8] = b"bcdfghjklmnprstvwzxq_/.";
    const VOWELS: &[u8] = b"aaeeiioouy";
    const TAILS: &[u8] = b"nrstlmdkpx";
    let mut word = String::new();
    for _ in 0..=rng.below(4) {
        word.push(HEADS[rng.below(23) as usize] as char);
        word.push(VOWELS[rng.below(10) as usize] as char);
        if rng.below(2) == 0 {
            word.push(TAILS[rng.below(10) as usize] as char);
        }
    }
    word
}

fn uuid(rng: &mut TestRng) -> String {
    let mut hex = |digits: usize| {
        (0..digits)
            .map(|_| format!("{:x}", rng.below(16)))
            .collect::<String>()
    };
    format!("{}-{}-4{}-a{}-{}", hex(8), hex(4), hex(3), hex(3), hex(12))
}
