//! Proxies that inject network faults or count requests. Dropping one ends its threads and sockets.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A listener on a free loopback port with a thread per connection.
struct Listener {
    addr: SocketAddr,
    stopped: Arc<AtomicBool>,
    open: Arc<Mutex<HashMap<usize, TcpStream>>>,
    accepting: Option<JoinHandle<()>>,
}

impl Listener {
    fn start(
        stopped: Arc<AtomicBool>,
        serve: impl Fn(&TcpStream) + Send + Sync + 'static,
    ) -> Listener {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let open = Arc::new(Mutex::new(HashMap::new()));
        let serve = Arc::new(serve);
        let (stop, connections) = (stopped.clone(), open.clone());
        let accepting = thread::spawn(move || {
            for (id, client) in listener.incoming().flatten().enumerate() {
                if stop.load(SeqCst) {
                    return;
                }
                let (serve, connections) = (serve.clone(), connections.clone());
                connections
                    .lock()
                    .unwrap()
                    .insert(id, client.try_clone().unwrap());
                thread::spawn(move || {
                    serve(&client);
                    client.shutdown(Shutdown::Both).ok();
                    connections.lock().unwrap().remove(&id);
                });
            }
        });
        Listener {
            addr,
            stopped,
            open,
            accepting: Some(accepting),
        }
    }

    fn cut_all(&self) {
        for connection in self.open.lock().unwrap().values() {
            connection.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stopped.store(true, SeqCst);
        // Only a connection ends a waiting accept.
        TcpStream::connect(self.addr).ok();
        self.accepting.take().map(JoinHandle::join);
        self.cut_all();
    }
}

/// Forwards both directions until the server closes, or until `up` or `down` ends it.
fn relay(
    client: &TcpStream,
    target: SocketAddr,
    up: impl FnOnce(&TcpStream) + Send,
    down: impl FnOnce(&TcpStream),
) {
    let Ok(server) = TcpStream::connect(target) else {
        return;
    };
    for socket in [client, &server] {
        socket.set_nodelay(true).ok();
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            up(&server);
            server.shutdown(Shutdown::Write).ok();
        });
        down(&server);
        for socket in [client, &server] {
            socket.shutdown(Shutdown::Both).ok();
        }
    });
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    Pass,
    /// Accept and close at once. Open connections are closed too.
    Refuse,
    /// Accept and forward nothing in either direction until the mode changes.
    Hang,
    /// Close a connection after this many bytes to the client, counted since `set` or since the
    /// connection started.
    CutAfter(usize),
    /// Close a connection after this many bytes to the server, counted in the same way.
    CutRequestAfter(usize),
    /// Forward requests, and close the connection when the server starts to respond. The server has
    /// executed the request then.
    DropResponses,
    /// Forward requests and discard the responses. The connection stays open and silent.
    Swallow,
    /// Like `Swallow`, and close the direction to the client; its requests are still forwarded.
    HalfClose,
    /// Delay each chunk of a response.
    Delay(Duration),
    /// Limit each direction of each connection to this many bytes per second.
    Throttle(usize),
}

/// A TCP proxy whose fault can change while it runs.
pub struct TcpProxy {
    listener: Listener,
    control: Arc<Control>,
}

struct Control {
    /// The mode and the number of changes so far, by which a connection recognizes a new
    /// `CutAfter`.
    mode: Mutex<(usize, Mode)>,
    stopped: Arc<AtomicBool>,
    connections: AtomicUsize,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
}

impl TcpProxy {
    pub fn start(target: SocketAddr) -> TcpProxy {
        let stopped = Arc::new(AtomicBool::new(false));
        let control = Arc::new(Control {
            mode: Mutex::new((0, Mode::Pass)),
            stopped: stopped.clone(),
            connections: AtomicUsize::new(0),
            bytes_up: AtomicU64::new(0),
            bytes_down: AtomicU64::new(0),
        });
        let shared = control.clone();
        let listener = Listener::start(stopped, move |client| {
            shared.connections.fetch_add(1, SeqCst);
            if shared.wait_while_hanging().1 == Mode::Refuse {
                return;
            }
            relay(
                client,
                target,
                |server| shared.forward(client, server, false),
                |server| shared.forward(server, client, true),
            );
        });
        TcpProxy { listener, control }
    }

    pub fn addr(&self) -> SocketAddr {
        self.listener.addr
    }

    pub fn set(&self, mode: Mode) {
        {
            let mut current = self.control.mode.lock().unwrap();
            *current = (current.0 + 1, mode);
        }
        if mode == Mode::Refuse {
            self.listener.cut_all();
        }
    }

    /// Number of connections so far, including refused ones.
    pub fn connections(&self) -> usize {
        self.control.connections.load(SeqCst)
    }

    /// Bytes forwarded to the server.
    pub fn bytes_up(&self) -> u64 {
        self.control.bytes_up.load(SeqCst)
    }

    /// Bytes forwarded to the client.
    pub fn bytes_down(&self) -> u64 {
        self.control.bytes_down.load(SeqCst)
    }
}

impl Control {
    fn wait_while_hanging(&self) -> (usize, Mode) {
        loop {
            let current = *self.mode.lock().unwrap();
            if self.stopped.load(SeqCst) {
                return (current.0, Mode::Refuse);
            }
            if current.1 != Mode::Hang {
                return current;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn forward(&self, mut from: &TcpStream, mut to: &TcpStream, to_client: bool) {
        let counter = if to_client {
            &self.bytes_down
        } else {
            &self.bytes_up
        };
        let mut buffer = [0; 16 * 1024];
        let mut since_set = (0, 0);
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            let mut rest = &buffer[..read];
            while !rest.is_empty() {
                let (change, mode) = self.wait_while_hanging();
                if since_set.0 != change {
                    since_set = (change, 0);
                }
                let mut take = rest.len();
                let mut pause = Duration::ZERO;
                match mode {
                    Mode::Refuse => return,
                    // An interim response only requests the rest of the request.
                    _ if to_client && rest.starts_with(b"HTTP/1.1 100 ") => {}
                    Mode::DropResponses if to_client => return,
                    Mode::Swallow | Mode::HalfClose if to_client => {
                        if mode == Mode::HalfClose {
                            to.shutdown(Shutdown::Write).ok();
                        }
                        // Bytes are missing from here on, so nothing may follow.
                        io::copy(&mut from, &mut io::sink()).ok();
                        return;
                    }
                    Mode::CutAfter(limit) if to_client && since_set.1 >= limit => return,
                    Mode::CutAfter(limit) if to_client => take = take.min(limit - since_set.1),
                    Mode::CutRequestAfter(limit) if !to_client && since_set.1 >= limit => {
                        for socket in [from, to] {
                            socket.shutdown(Shutdown::Both).ok();
                        }
                        return;
                    }
                    Mode::CutRequestAfter(limit) if !to_client => {
                        take = take.min(limit - since_set.1)
                    }
                    Mode::Delay(delay) if to_client && rest.len() == read => thread::sleep(delay),
                    Mode::Throttle(rate) => {
                        take = take.min(rate.div_ceil(20));
                        pause = Duration::from_secs_f64(take as f64 / rate as f64);
                    }
                    _ => {}
                }
                // Before the bytes are sent; otherwise a reader of the response might see an old
                // count.
                counter.fetch_add(take as u64, SeqCst);
                if to.write_all(&rest[..take]).is_err() {
                    return;
                }
                thread::sleep(pause);
                since_set.1 += take;
                rest = &rest[take..];
                if to_client && matches!(mode, Mode::CutAfter(limit) if since_set.1 >= limit) {
                    return;
                }
            }
        }
    }
}

/// An HTTP/1.1 proxy that records each request and can make a store ignore conditional creates.
pub struct CountingProxy {
    listener: Listener,
    lines: Arc<Mutex<Vec<String>>>,
}

impl CountingProxy {
    /// With `drop_conditions`, removes If-None-Match and If-Match, and the signature, which covers
    /// them: the server must accept anonymous requests. It then rejects bodies in signed chunks.
    pub fn start(target: SocketAddr, drop_conditions: bool) -> CountingProxy {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let recorded = lines.clone();
        let listener = Listener::start(Arc::default(), move |client| {
            let up = |server: &TcpStream| {
                // An error ends the connection, which both sides notice.
                forward_requests(client, server, &recorded, drop_conditions).ok();
            };
            let down = |mut server: &TcpStream| {
                io::copy(&mut server, &mut &*client).ok();
            };
            relay(client, target, up, down);
        });
        CountingProxy { listener, lines }
    }

    pub fn addr(&self) -> SocketAddr {
        self.listener.addr
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// Number of requests so far.
    pub fn count(&self) -> usize {
        self.lines.lock().unwrap().len()
    }

    /// Method and path with query of each request so far, in order of arrival.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }
}

fn forward_requests(
    client: &TcpStream,
    mut server: &TcpStream,
    lines: &Mutex<Vec<String>>,
    drop_conditions: bool,
) -> io::Result<()> {
    let mut client = BufReader::new(client);
    loop {
        let mut head = vec![read_line(&mut client)?];
        while head.last().is_some_and(|line| !line.trim().is_empty()) {
            head.push(read_line(&mut client)?);
        }
        lines
            .lock()
            .unwrap()
            .push(head[0].trim().trim_end_matches(" HTTP/1.1").to_owned());
        let value = |name: &str| {
            let (_, value) = head[1..]
                .iter()
                .filter_map(|line| line.split_once(':'))
                .find(|(key, _)| key.eq_ignore_ascii_case(name))?;
            Some(value.trim().to_owned())
        };
        let conditions = ["if-none-match", "if-match"];
        let edit = drop_conditions && conditions.iter().any(|name| value(name).is_some());
        let dropped = |line: &str| {
            let name = line
                .split(':')
                .next()
                .unwrap_or_default()
                .to_ascii_lowercase();
            edit && (name == "authorization" || conditions.contains(&name.as_str()))
        };
        let sent: String = head
            .iter()
            .filter(|line| !dropped(line))
            .map(String::as_str)
            .collect();
        server.write_all(sent.as_bytes())?;
        if let Some(length) = value("content-length").and_then(|length| length.parse().ok()) {
            io::copy(&mut client.by_ref().take(length), &mut server)?;
        } else if value("transfer-encoding")
            .is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"))
        {
            forward_chunks(&mut client, server)?;
        }
    }
}

fn forward_chunks(client: &mut impl BufRead, mut server: &TcpStream) -> io::Result<()> {
    loop {
        let line = read_line(client)?;
        server.write_all(line.as_bytes())?;
        let size = line.trim().split(';').next().unwrap_or_default();
        let size = u64::from_str_radix(size, 16).map_err(io::Error::other)?;
        if size == 0 {
            break;
        }
        // The chunk and the line break after it.
        io::copy(&mut client.by_ref().take(size + 2), &mut server)?;
    }
    loop {
        let trailer = read_line(client)?;
        server.write_all(trailer.as_bytes())?;
        if trailer.trim().is_empty() {
            return Ok(());
        }
    }
}

fn read_line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    match from.read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line),
    }
}
