//! Plain HTTP requests over a TCP connection.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};

use super::PATIENCE;

/// A response of a server.
pub struct Response {
    pub status: u16,
    pub body: String,
    /// The connection ended without an error, and the body has the announced length.
    pub is_complete: bool,
}

/// Sends a request, which must make the server close the connection. Returns none without a
/// response.
pub fn send(address: impl ToSocketAddrs, request: &str) -> Option<Response> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).ok()?;
    let mut bytes = Vec::new();
    // A server that rejects a request before it has read everything resets the connection after its
    // response.
    let read = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .and_then(|length| length.parse().ok());
    Some(Response {
        status: head.split(' ').nth(1)?.parse().ok()?,
        body: body.to_owned(),
        is_complete: read.is_ok() && length == Some(body.len()),
    })
}
