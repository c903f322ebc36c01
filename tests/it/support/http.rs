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

/// Sends a request, which must make the server close the connection. Returns the head and the body
/// of the response, or none without a response.
pub fn exchange(address: impl ToSocketAddrs, request: &[u8]) -> Option<(String, Vec<u8>)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A server that rejects a request before it has read everything resets the connection after its
    // response.
    let _ = stream.write_all(request);
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let (head, body) = (&bytes[..end], &bytes[end + 4..]);
    let head = String::from_utf8(head.to_vec()).unwrap();
    let is_chunked = head.to_lowercase().contains("transfer-encoding: chunked");
    let body = if is_chunked {
        unchunk(body)
    } else {
        body.to_vec()
    };
    Some((head, body))
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        body.extend_from_slice(&bytes[end + 2..][..size]);
        bytes = &bytes[end + 2 + size + 2..];
        if size == 0 {
            break;
        }
    }
    body
}
