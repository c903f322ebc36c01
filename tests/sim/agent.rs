//! The agent: appends lines that are all different, leaves one unfinished, rewrites, cuts back, moves, and writes files
//! beside its transcript.

use super::dice::Dice;
use super::disk::Disk;
use super::history::whole_lines;

/// The session that everything is about.
pub const SESSION: &str = "s1";

/// The agent of one volume.
#[derive(Default)]
pub struct Agent {
    project: u64,
    /// The rest of a line that it has begun, and where.
    begun: Option<(String, Vec<u8>)>,
}

/// Which of its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    Transcript,
    SubAgent,
}

impl Agent {
    fn directory(&self) -> String {
        format!("projects/-p{}", self.project)
    }

    fn path(&self, which: Which) -> String {
        match which {
            Which::Transcript => format!("{}/{SESSION}.jsonl", self.directory()),
            Which::SubAgent => format!("{}/{SESSION}/subagents/agent-1.jsonl", self.directory()),
        }
    }

    /// Another agent starts on the volume: it goes on where the newest transcript is.
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

    fn finish_line(&mut self, disk: &Disk, path: &str, dice: &mut Dice) {
        if let Some((_, rest)) = self.begun.take_if(|(begun, _)| begun == path) {
            disk.agent_writes(path, None, &rest, dice);
        }
    }

    pub fn append(&mut self, disk: &Disk, which: Which, lines: u64, dice: &mut Dice) {
        let path = self.path(which);
        self.finish_line(disk, &path, dice);
        let text: Vec<u8> = (0..lines).flat_map(|_| line(dice, None)).collect();
        disk.agent_writes(&path, None, &text, dice);
    }

    /// Half a line; the rest comes with the next append.
    pub fn begin_line(&mut self, disk: &Disk, which: Which, dice: &mut Dice) {
        let path = self.path(which);
        self.finish_line(disk, &path, dice);
        let mut text = line(dice, None);
        let rest = text.split_off(1 + dice.below(text.len() as u64 - 1) as usize);
        disk.agent_writes(&path, None, &text, dice);
        self.begun = Some((path, rest));
    }

    /// Writes the file anew, shorter or longer: in place, or as another file under the same name.
    pub fn rewrite(&mut self, disk: &Disk, which: Which, in_place: bool, dice: &mut Dice) {
        let path = self.path(which);
        self.begun.take_if(|(begun, _)| *begun == path);
        let lines = 1 + dice.below(6);
        let text: Vec<u8> = (0..lines).flat_map(|_| line(dice, None)).collect();
        match in_place {
            true => disk.agent_writes(&path, Some(0), &text, dice),
            false => disk.agent_replaces(&path, &text, dice),
        }
    }

    /// Cuts the file back: behind a whole line, or anywhere.
    pub fn cut_back(&mut self, disk: &Disk, which: Which, anywhere: bool, dice: &mut Dice) {
        let path = self.path(which);
        let Some(bytes) = disk.bytes(&path).filter(|bytes| !bytes.is_empty()) else {
            return;
        };
        self.begun.take_if(|(begun, _)| *begun == path);
        let at = dice.below(bytes.len() as u64) as usize;
        let at = if anywhere {
            at
        } else {
            whole_lines(&bytes[..at])
        };
        disk.agent_writes(&path, Some(at), &[], dice);
    }

    /// The agent changes its working directory: transcript and side files get another project directory.
    pub fn move_on(&mut self, disk: &Disk, dice: &mut Dice) {
        let from = self.directory();
        self.project = (self.project + 1) % 3;
        self.begun = None;
        let to = self.directory();
        for path in disk
            .agents_files()
            .into_keys()
            .filter(|path| path.starts_with(&format!("{from}/")))
        {
            disk.agent_renames(&path, &format!("{to}{}", &path[from.len()..]), dice);
        }
    }

    /// A tool's result, then the line that names it.
    pub fn tool(&mut self, disk: &Disk, dice: &mut Dice) -> String {
        let name = format!("t{:x}.txt", dice.next() >> 40);
        let path = format!("{}/{SESSION}/tool-results/{name}", self.directory());
        let size = 1 + dice.below(80);
        let bytes: Vec<u8> = (0..size).map(|_| b'a' + dice.below(26) as u8).collect();
        disk.agent_writes(&path, None, &bytes, dice);
        name
    }

    pub fn name_tool(&mut self, disk: &Disk, name: &str, dice: &mut Dice) {
        let path = self.path(Which::Transcript);
        self.finish_line(disk, &path, dice);
        disk.agent_writes(&path, None, &line(dice, Some(name)), dice);
    }

    /// Replaces a small file as one; often with one of the same length.
    pub fn side(&mut self, disk: &Disk, in_place: bool, dice: &mut Dice) {
        let path = format!("tasks/{SESSION}/1.json");
        let text = format!("{{\"n\":{:03}}}", dice.below(1000));
        match in_place {
            true => disk.agent_writes(&path, Some(0), text.as_bytes(), dice),
            false => disk.agent_replaces(&path, text.as_bytes(), dice),
        }
    }
}

/// A line that no other is like; now and then longer than the window that is compared at a look.
fn line(dice: &mut Dice, names: Option<&str>) -> Vec<u8> {
    let id = dice.next();
    let length = if dice.percent(6) {
        1500 + dice.below(4000)
    } else {
        dice.below(60)
    };
    let pad: String = (0..length)
        .map(|at| if at % 7 == 0 { ' ' } else { 'x' })
        .collect();
    let names = names.map_or_else(String::new, |name| format!(",\"ref\":\"{name}\""));
    format!("{{\"id\":\"{id:016x}\",\"pad\":\"{pad}\"{names}}}\n").into_bytes()
}
