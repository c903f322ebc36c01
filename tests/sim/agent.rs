//! The agent: appends unique lines, leaves one unfinished, rewrites, truncates, moves, and writes
//! side files.

use super::disk::Disk;
use super::history::complete_lines_len;
use super::rng::SeededRng;

/// The only session of a run.
pub const SESSION: &str = "s1";

/// The agent of one volume.
#[derive(Default)]
pub struct Agent {
    project: u64,
    /// The path of a partial line, and the rest of the line.
    begun: Option<(String, Vec<u8>)>,
}

/// One of the transcripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileChoice {
    Transcript,
    SubAgent,
}

impl Agent {
    fn directory(&self) -> String {
        format!("projects/-p{}", self.project)
    }

    fn path(&self, which: FileChoice) -> String {
        match which {
            FileChoice::Transcript => format!("{}/{SESSION}.jsonl", self.directory()),
            FileChoice::SubAgent => {
                format!("{}/{SESSION}/subagents/agent-1.jsonl", self.directory())
            }
        }
    }

    /// A new agent starts on the volume and continues in the project of the newest transcript.
    pub fn launch(&mut self, disk: &Disk) {
        self.begun = None;
        let files = disk.agents_files();
        let ending = format!("/{SESSION}.jsonl");
        let transcripts = files.iter().filter(|(path, _)| path.ends_with(&ending));
        let newest = transcripts.max_by_key(|(_, (_, mtime, _))| *mtime);
        if let Some(project) = newest.and_then(|(path, _)| {
            path.strip_prefix("projects/-p")?
                .split('/')
                .next()?
                .parse()
                .ok()
        }) {
            self.project = project;
        }
    }

    fn finish_line(&mut self, disk: &Disk, path: &str, rng: &mut SeededRng) {
        if let Some((_, rest)) = self.begun.take_if(|(begun, _)| begun == path) {
            disk.agent_writes(path, None, &rest, rng);
        }
    }

    pub fn append(&mut self, disk: &Disk, which: FileChoice, lines: u64, rng: &mut SeededRng) {
        let path = self.path(which);
        self.finish_line(disk, &path, rng);
        let text: Vec<u8> = (0..lines).flat_map(|_| line(rng, None)).collect();
        disk.agent_writes(&path, None, &text, rng);
    }

    /// Half a line; the rest comes with the next append.
    pub fn begin_line(&mut self, disk: &Disk, which: FileChoice, rng: &mut SeededRng) {
        let path = self.path(which);
        self.finish_line(disk, &path, rng);
        let mut text = line(rng, None);
        let rest = text.split_off(1 + rng.below(text.len() as u64 - 1) as usize);
        disk.agent_writes(&path, None, &text, rng);
        self.begun = Some((path, rest));
    }

    /// Rewrites the file, shorter or longer: in place, or as a new file with the same name.
    pub fn rewrite(&mut self, disk: &Disk, which: FileChoice, in_place: bool, rng: &mut SeededRng) {
        let path = self.path(which);
        self.begun.take_if(|(begun, _)| *begun == path);
        let lines = 1 + rng.below(6);
        let text: Vec<u8> = (0..lines).flat_map(|_| line(rng, None)).collect();
        match in_place {
            true => disk.agent_writes(&path, Some(0), &text, rng),
            false => disk.agent_replaces(&path, &text, rng),
        }
    }

    /// Truncates the file: after a complete line, or anywhere.
    pub fn truncate_file(
        &mut self,
        disk: &Disk,
        which: FileChoice,
        anywhere: bool,
        rng: &mut SeededRng,
    ) {
        let path = self.path(which);
        let Some(bytes) = disk.bytes(&path).filter(|bytes| !bytes.is_empty()) else {
            return;
        };
        self.begun.take_if(|(begun, _)| *begun == path);
        let at = rng.below(bytes.len() as u64) as usize;
        let at = if anywhere {
            at
        } else {
            complete_lines_len(&bytes[..at])
        };
        disk.agent_writes(&path, Some(at), &[], rng);
    }

    /// The agent changes its working directory: transcript and side files get another project directory.
    pub fn change_project(&mut self, disk: &Disk, rng: &mut SeededRng) {
        let from = self.directory();
        self.project = (self.project + 1) % 3;
        self.begun = None;
        let to = self.directory();
        for path in disk
            .agents_files()
            .into_keys()
            .filter(|path| path.starts_with(&format!("{from}/")))
        {
            disk.agent_renames(&path, &format!("{to}{}", &path[from.len()..]), rng);
        }
    }

    /// Writes a tool result. Returns its name, for `name_tool`.
    pub fn write_tool_result(&mut self, disk: &Disk, rng: &mut SeededRng) -> String {
        let name = format!("t{:x}.txt", rng.next() >> 40);
        let path = format!("{}/{SESSION}/tool-results/{name}", self.directory());
        let size = 1 + rng.below(80);
        let bytes: Vec<u8> = (0..size).map(|_| b'a' + rng.below(26) as u8).collect();
        disk.agent_writes(&path, None, &bytes, rng);
        name
    }

    pub fn name_tool(&mut self, disk: &Disk, name: &str, rng: &mut SeededRng) {
        let path = self.path(FileChoice::Transcript);
        self.finish_line(disk, &path, rng);
        disk.agent_writes(&path, None, &line(rng, Some(name)), rng);
    }

    /// Replaces a side file, often with one of the same length. A long one is uploaded in parts.
    pub fn replace_side_file(&mut self, disk: &Disk, in_place: bool, rng: &mut SeededRng) {
        let path = format!("tasks/{SESSION}/1.json");
        let pad = if rng.percent(30) { 90 } else { 0 };
        let text = format!("{{\"n\":{:03}{:pad$}}}", rng.below(1000), "");
        match in_place {
            true => disk.agent_writes(&path, Some(0), text.as_bytes(), rng),
            false => disk.agent_replaces(&path, text.as_bytes(), rng),
        }
    }
}

/// A unique line; sometimes longer than the window that a scan compares.
fn line(rng: &mut SeededRng, names: Option<&str>) -> Vec<u8> {
    let id = rng.next();
    let length = if rng.percent(6) {
        1500 + rng.below(4000)
    } else {
        rng.below(60)
    };
    let pad: String = (0..length)
        .map(|at| if at % 7 == 0 { ' ' } else { 'x' })
        .collect();
    let names = names.map_or_else(String::new, |name| format!(",\"ref\":\"{name}\""));
    format!("{{\"id\":\"{id:016x}\",\"pad\":\"{pad}\"{names}}}\n").into_bytes()
}
