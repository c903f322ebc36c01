//! A scripted model on loopback that records its requests.
//!
//! Owns HTTP and the plan inside a prompt: a prompt carries the responses for each round, so a test
//! reads as a conversation and the server keeps no state. Does not own the API formats.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use super::{anthropic, openai};
use crate::support::backend::eventually;

/// The marker before a plan in a prompt.
const MARK: &str = "PLAN:";

/// The prefix of every tool call ID. It is on disk with the call, and in no prompt.
pub const CALL: &str = "toolu_";

/// The model responds with this text.
pub fn text_reply(text: &str) -> Value {
    json!({ "say": text })
}

/// The model sends this text and then hangs until the connection closes.
pub fn hanging_reply(text: &str) -> Value {
    json!({ "say": text, "hang": true })
}

/// The model responds with this number of bytes.
pub fn reply_of_size(bytes: usize) -> Value {
    json!({ "fill": bytes })
}

/// The model calls a tool.
pub fn tool_call_reply(tool: &str, input: Value) -> Value {
    json!({ "call": tool, "input": input })
}

/// A prompt that contains the model's responses, round by round.
pub fn prompt(words: &str, rounds: &[Vec<Value>]) -> String {
    format!("{words} {MARK}{}", json!(rounds))
}

/// One block of a response.
#[derive(Debug, Clone)]
pub enum Block {
    Text {
        text: String,
        hang: bool,
    },
    Call {
        id: String,
        tool: String,
        input: Value,
    },
}

/// The plan in a text.
fn plan(text: &str) -> Option<Vec<Vec<Value>>> {
    let (_, plan) = text.split_once(MARK)?;
    serde_json::Deserializer::from_str(plan)
        .into_iter()
        .next()?
        .ok()
}

/// The blocks of the last plan among `texts` for the current round. Each text comes with the number
/// of responses after it.
pub fn planned(texts: impl Iterator<Item = (String, usize)>) -> Option<Vec<Block>> {
    let (plan, round) = texts
        .filter_map(|(text, round)| Some((plan(&text)?, round)))
        .last()?;
    let block = |step: &Value| match step["call"].as_str() {
        Some(tool) => Block::Call {
            id: format!("{CALL}{}", uuid::Uuid::new_v4().simple()),
            tool: tool.to_owned(),
            input: step["input"].clone(),
        },
        None => {
            let filler = || {
                "lorem ipsum dolor sit amet "
                    .chars()
                    .cycle()
                    .take(step["fill"].as_u64().unwrap_or(0) as usize)
                    .collect()
            };
            Block::Text {
                text: step["say"].as_str().map_or_else(filler, str::to_owned),
                hang: step["hang"] == true,
            }
        }
    };
    Some(plan.get(round)?.iter().map(block).collect())
}

/// A recorded request.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    pub body: Value,
}

/// The conversation that a request carries, line by line.
pub fn conversation(request: &Request) -> Vec<String> {
    if request.path.starts_with("/v1/messages") {
        anthropic::conversation(request)
    } else {
        openai::conversation(request)
    }
}

/// The server.
pub struct Model {
    addr: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    requests: Mutex<Vec<Request>>,
    stopped: AtomicBool,
}

impl Model {
    pub fn start() -> Model {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let model = Model {
            addr: listener.local_addr().unwrap(),
            shared: Arc::default(),
        };
        let shared = model.shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.stopped.load(Ordering::Relaxed) {
                    return;
                }
                let shared = shared.clone();
                // Some tests kill the client during a response.
                std::thread::spawn(move || shared.serve(stream).ok());
            }
        });
        model
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Waits for the first request of a conversation that contains these words.
    #[track_caller]
    pub fn wait_for_request(&self, words: &str) -> Request {
        eventually(&format!("the model is asked {words:?}"), || {
            !self.conversations(words).is_empty()
        });
        self.conversations(words).remove(0)
    }

    /// The last request of a conversation that contains these words.
    #[track_caller]
    pub fn last(&self, words: &str) -> Request {
        self.conversations(words)
            .pop()
            .unwrap_or_else(|| panic!("the model was never asked {words:?}"))
    }

    /// A request without tools asks for a title.
    fn conversations(&self, words: &str) -> Vec<Request> {
        let talks = |request: &Request| {
            request.body["tools"]
                .as_array()
                .is_some_and(|tools| !tools.is_empty())
        };
        self.requests()
            .into_iter()
            .filter(|request| talks(request) && request.body.to_string().contains(words))
            .collect()
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the listener.
        let _ = TcpStream::connect(self.addr);
    }
}

impl Shared {
    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut wire = Wire {
            stream,
            shared: self,
        };
        while let Some((method, path, body)) = read_request(&mut reader)? {
            if method != "POST" {
                wire.reply(404, &json!({}))?;
                continue;
            }
            let request = Request {
                path,
                body: serde_json::from_slice(&body).unwrap_or_default(),
            };
            self.requests.lock().unwrap().push(request.clone());
            if request.path.starts_with("/v1/messages") {
                anthropic::answer(&request, &mut wire)?;
            } else if request.path.starts_with("/v1/responses") {
                openai::respond(&request, &mut wire)?;
            } else if request.path.starts_with("/v1/chat/completions") {
                openai::chat(&request, &mut wire)?;
            } else {
                wire.reply(
                    404,
                    &json!({ "error": { "message": format!("there is no {}", request.path) } }),
                )?;
            }
        }
        Ok(())
    }
}

/// The connection for a response.
pub struct Wire<'a> {
    stream: TcpStream,
    shared: &'a Shared,
}

impl Wire<'_> {
    pub fn reply(&mut self, status: u16, body: &Value) -> std::io::Result<()> {
        let body = body.to_string();
        write!(
            self.stream,
            "HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    /// Begins a stream of events, which ends with the connection.
    pub fn stream(&mut self) -> std::io::Result<()> {
        write!(
            self.stream,
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )
    }

    pub fn event(&mut self, name: &str, mut data: Value) -> std::io::Result<()> {
        data["type"] = json!(name);
        writeln!(self.stream, "event: {name}")?;
        self.data(&data.to_string())
    }

    /// An event without a name.
    pub fn data(&mut self, data: &str) -> std::io::Result<()> {
        write!(self.stream, "data: {data}\n\n")
    }

    /// Sends nothing more until the test ends.
    pub fn hang(&self) {
        while !self.shared.stopped.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the stream.
    pub fn close(&self) -> std::io::Result<()> {
        self.stream.shutdown(std::net::Shutdown::Both)
    }
}

/// Method, path and body; none at the end of the connection.
fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<(String, String, Vec<u8>)>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    let (mut length, mut chunked) = (0, false);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let header = header.trim().to_ascii_lowercase();
        match header.split_once(':') {
            Some(("content-length", value)) => length = value.trim().parse().unwrap_or(0),
            Some(("transfer-encoding", value)) => chunked = value.contains("chunked"),
            Some(_) => {}
            None => break,
        }
    }
    let mut body = Vec::new();
    if !chunked {
        reader.take(length).read_to_end(&mut body)?;
        return Ok(Some((method, path, body)));
    }
    loop {
        let mut size = String::new();
        reader.read_line(&mut size)?;
        let size = u64::from_str_radix(size.trim(), 16).unwrap_or(0);
        reader.take(size).read_to_end(&mut body)?;
        reader.read_line(&mut String::new())?;
        if size == 0 {
            return Ok(Some((method, path, body)));
        }
    }
}
