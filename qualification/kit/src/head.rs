//! Reading the head of a request: bounded in size and time.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

/// A head may be this long.
const LONGEST: usize = 16 * 1024;
/// A head may have so many headers.
const HEADERS: usize = 100;
/// A connection may be silent for this long between two requests, and a head take this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// The head of a request.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// Decoded, and it begins with `/`.
    pub(crate) path: String,
    pub(crate) query: Option<String>,
    /// The target as it was sent, without scheme and authority.
    pub(crate) target: String,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    /// Whether the connection is to stay open.
    pub(crate) keep_alive: bool,
}

/// What came in.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A request; what follows it stays in the inbox.
    Request(Head),
    /// Something that is answered by this status, and why.
    Refused(u16, &'static str),
    /// Nothing more.
    Nothing,
}

impl Head {
    /// A header; the name in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    #[cfg(test)]
    pub(crate) fn get(path: &str) -> Self {
        parse(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n").as_bytes()).expect("a good head")
    }
}

/// Reads one head. What was read beyond it stays in the inbox.
pub(crate) async fn read<W: AsyncRead + Unpin + ?Sized>(
    wire: &mut W,
    inbox: &mut Vec<u8>,
) -> io::Result<Incoming> {
    match timeout(PATIENCE, read_patiently(wire, inbox)).await {
        Ok(incoming) => incoming,
        Err(_) if inbox.is_empty() => Ok(Incoming::Nothing),
        Err(_) => Ok(Incoming::Refused(408, "the head of the request did not arrive in time")),
    }
}

async fn read_patiently<W: AsyncRead + Unpin + ?Sized>(
    wire: &mut W,
    inbox: &mut Vec<u8>,
) -> io::Result<Incoming> {
    loop {
        if let Some(end) = inbox.windows(4).position(|four| four == b"\r\n\r\n") {
            let head: Vec<u8> = inbox.drain(..end + 4).collect();
            return Ok(
                parse(&head).map_or_else(|(status, why)| Incoming::Refused(status, why), Incoming::Request)
            );
        }
        if inbox.len() > LONGEST {
            return Ok(Incoming::Refused(431, "the head of the request is too long"));
        }
        let mut bytes = [0; 4096];
        match wire.read(&mut bytes).await? {
            0 if inbox.is_empty() => return Ok(Incoming::Nothing),
            0 => return Ok(Incoming::Refused(400, "the request stops in its head")),
            count => inbox.extend_from_slice(&bytes[..count]),
        }
    }
}

/// Reads a head that is complete. An error is the status to answer and why.
fn parse(head: &[u8]) -> Result<Head, (u16, &'static str)> {
    let text = std::str::from_utf8(head).map_err(|_| (400, "the head is not text"))?;
    let mut lines = text.trim_end_matches("\r\n").split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, target, version) = match (words.next(), words.next(), words.next(), words.next()) {
        (Some(method), Some(target), Some(version), None) if !method.is_empty() => (method, target, version),
        _ => return Err((400, "the request line is not three words")),
    };
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        return Err((505, "only HTTP/1.1 and HTTP/1.0 are spoken here"));
    }
    let mut headers = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(':').ok_or((400, "a header has no colon"))?;
        if name.is_empty() || name.contains([' ', '\t']) {
            return Err((400, "a header has no name, or spaces in it"));
        }
        if headers.len() == HEADERS {
            return Err((431, "too many headers"));
        }
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let target = without_authority(target).ok_or((400, "the target is not a path"))?;
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query.to_owned())),
        None => (target, None),
    };
    let path = decode(path).ok_or((400, "the path is not decodable"))?;
    let target = target.to_owned();
    let mut head = Head { method: method.to_owned(), path, query, target, headers, keep_alive: false };
    let connection = head.header("connection").unwrap_or_default().to_ascii_lowercase();
    head.keep_alive = if version == "HTTP/1.1" { connection != "close" } else { connection == "keep-alive" };
    Ok(head)
}

/// `http://host/path` (what is sent to a proxy) is taken for `/path`.
fn without_authority(target: &str) -> Option<&str> {
    let target = target.split('#').next()?;
    if target.starts_with('/') {
        return Some(target);
    }
    let (_, rest) = target.split_once("://")?;
    rest.find('/').map(|at| &rest[at..])
}

/// Takes `%2F` for what it stands for.
fn decode(path: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        decoded.push(digit(bytes.next()?)? << 4 | digit(bytes.next()?)?);
    }
    String::from_utf8(decoded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(head: &str) -> u16 {
        parse(head.as_bytes()).expect_err("refused").0
    }

    #[test]
    fn a_good_head() {
        let head =
            parse(b"GET http://h:1/a%20b/c?x=%41 HTTP/1.1\r\nHost: h\r\nRange:  bytes=1- \r\n\r\n").unwrap();
        assert_eq!((head.path.as_str(), head.query.as_deref()), ("/a b/c", Some("x=%41")));
        assert_eq!(head.target, "/a%20b/c?x=%41");
        assert_eq!(head.header("range"), Some("bytes=1-"));
        assert!(head.keep_alive);
        assert!(!parse(b"GET / HTTP/1.0\r\n\r\n").unwrap().keep_alive);
        assert!(!parse(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").unwrap().keep_alive);
    }

    #[test]
    fn heads_that_are_refused() {
        assert_eq!(refused("GET /\r\n\r\n"), 400);
        assert_eq!(refused("GET / HTTP/1.1 x\r\n\r\n"), 400);
        assert_eq!(refused("GET / HTTP/2\r\n\r\n"), 505);
        assert_eq!(refused("GET /%zz HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(refused("GET /%f HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(refused("GET * HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(refused("GET / HTTP/1.1\r\nno colon\r\n\r\n"), 400);
        assert_eq!(refused("GET / HTTP/1.1\r\na b: c\r\n\r\n"), 400);
        assert_eq!(refused(&format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(101))), 431);
    }
}
