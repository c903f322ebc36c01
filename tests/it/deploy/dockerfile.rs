//! Parses a Dockerfile as far as ours needs it: the last stage, and what earlier stages copy into
//! the build.

/// A `COPY` of a stage.
#[derive(Debug)]
pub struct Copy {
    pub from_stage: bool,
    /// `USER:GROUP`, if given.
    pub owner: Option<String>,
    pub sources: Vec<String>,
    pub target: String,
}

/// One stage, from its `FROM` on.
#[derive(Debug, Default)]
pub struct Stage {
    pub base: String,
    lines: Vec<(String, String)>,
}

impl Stage {
    /// All stages of a file.
    pub fn read(text: &str) -> Vec<Stage> {
        let lines = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        let joined = lines.fold(String::new(), |all, line| match line.strip_suffix('\\') {
            Some(begun) => all + begun,
            None => all + line + "\n",
        });
        let mut stages: Vec<Stage> = Vec::new();
        for line in joined.lines() {
            let (word, rest) = line.split_once(' ').unwrap();
            if word == "FROM" {
                stages.push(Stage {
                    base: rest.split(' ').next().unwrap().to_owned(),
                    lines: Vec::new(),
                });
            } else if let Some(stage) = stages.last_mut() {
                stage.lines.push((word.to_owned(), rest.trim().to_owned()));
            }
        }
        stages
    }

    fn all(&self, word: &str) -> impl Iterator<Item = &str> {
        self.lines
            .iter()
            .filter(move |(known, _)| known == word)
            .map(|(_, rest)| rest.as_str())
    }

    /// The arguments of an instruction that occurs once.
    #[track_caller]
    pub fn one(&self, word: &str) -> &str {
        let mut all = self.all(word);
        let found = all.next().unwrap_or_else(|| panic!("no {word}: {self:?}"));
        assert!(all.next().is_none(), "more than one {word}");
        found
    }

    /// The arguments of an instruction in JSON form, which needs no shell.
    #[track_caller]
    pub fn list(&self, word: &str) -> Vec<String> {
        let text = self.one(word);
        let list = &text[text
            .find('[')
            .unwrap_or_else(|| panic!("{word} {text} needs a shell"))..];
        serde_json::from_str(list).unwrap_or_else(|error| panic!("{word} {text}: {error}"))
    }

    pub fn copies(&self) -> Vec<Copy> {
        let read = |rest: &str| {
            let (flags, mut paths): (Vec<String>, Vec<String>) = rest
                .split_whitespace()
                .map(str::to_owned)
                .partition(|word| word.starts_with("--"));
            let flag = |name: &str| {
                flags
                    .iter()
                    .find_map(|flag| flag.strip_prefix(name).map(str::to_owned))
            };
            let target = paths.pop().unwrap();
            Copy {
                from_stage: flag("--from=").is_some(),
                owner: flag("--chown="),
                sources: paths,
                target,
            }
        };
        self.all("COPY").map(read).collect()
    }

    pub fn environment(&self) -> Vec<(String, String)> {
        let pairs = self.all("ENV").flat_map(str::split_whitespace);
        pairs
            .map(|pair| {
                pair.split_once('=')
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .unwrap()
            })
            .collect()
    }

    /// The commands of a `RUN`, in order.
    pub fn runs(&self) -> Vec<Vec<&str>> {
        self.all("RUN")
            .map(|rest| rest.split("&&").map(str::trim).collect())
            .collect()
    }
}
