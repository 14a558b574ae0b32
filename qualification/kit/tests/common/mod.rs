//! What the tests look through: curl, and a bare socket.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kit::Server;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tempfile::TempDir;

/// A site with a pointer and a big file.
pub(crate) fn site() -> TempDir {
    let site = tempfile::tempdir().unwrap();
    kit::release::point(site.path(), "stable", "1.4.0").unwrap();
    std::fs::write(site.path().join("big"), big()).unwrap();
    site
}

/// A million bytes that are not all the same.
pub(crate) fn big() -> Vec<u8> {
    (0..1_000_000_u32).map(|number| u8::try_from(number % 251).unwrap()).collect()
}

/// A call of curl.
pub(crate) struct Curl {
    base: String,
    arguments: Vec<String>,
    directory: TempDir,
}

/// What curl saw.
#[derive(Debug)]
pub(crate) struct Answer {
    /// curl's exit status.
    pub(crate) exit: i32,
    /// The last status line's.
    pub(crate) status: u16,
    /// The last head.
    pub(crate) head: String,
    /// The body.
    pub(crate) body: Vec<u8>,
    /// curl's own words.
    pub(crate) says: String,
}

impl Curl {
    /// A call that trusts the server's authority.
    pub(crate) fn of(server: &Server) -> Self {
        Self::to(&server.url(), server)
    }

    /// The same under another name.
    pub(crate) fn to(base: &str, server: &Server) -> Self {
        let directory = tempfile::tempdir().unwrap();
        server.write_ca(directory.path().join("ca.pem")).unwrap();
        Self { base: base.to_owned(), arguments: Vec::new(), directory }
    }

    /// With arguments.
    pub(crate) fn with<const N: usize>(mut self, arguments: [&str; N]) -> Self {
        self.arguments.extend(arguments.map(str::to_owned));
        self
    }

    /// Fetches a path.
    pub(crate) fn get(self, path: &str) -> Answer {
        let file = |name: &str| self.directory.path().join(name);
        let output = Command::new("curl")
            .args(["-sS", "--max-time", "10", "--path-as-is", "--noproxy", "*", "--cacert"])
            .arg(file("ca.pem"))
            .arg("-D")
            .arg(file("head"))
            .arg("-o")
            .arg(file("body"))
            .arg(format!("{}{path}", self.base))
            .args(&self.arguments)
            .output()
            .expect("curl runs");
        let read = |name: &str| std::fs::read(file(name)).unwrap_or_default();
        let heads = String::from_utf8_lossy(&read("head")).into_owned();
        let head = heads.trim_end().rsplit("\r\n\r\n").next().unwrap_or_default().to_owned();
        let status = head.split(' ').nth(1).and_then(|status| status.trim().parse().ok()).unwrap_or(0);
        let says = String::from_utf8_lossy(&output.stderr).into_owned();
        Answer { exit: output.status.code().unwrap_or(-1), status, head, body: read("body"), says }
    }
}

impl Answer {
    /// A header of the last answer.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.head.lines().filter_map(|line| line.split_once(':'));
        headers.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }
}

/// Sends bytes to a plain server and reads until it closes.
pub(crate) fn raw(server: &Server, sent: &str) -> Vec<u8> {
    raw_and_end(server, sent).0
}

/// The same, and how it ended: nothing for a FIN, else the error.
pub(crate) fn raw_and_end(server: &Server, sent: &str) -> (Vec<u8>, Option<std::io::ErrorKind>) {
    converse(connect(server), sent)
}

/// The same through TLS: without `close_notify` the end is `UnexpectedEof`.
pub(crate) fn tls_and_end(server: &Server, sent: &str) -> (Vec<u8>, Option<std::io::ErrorKind>) {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.ca_pem().as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "127.0.0.1".try_into().unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    converse(StreamOwned::new(client, connect(server)), sent)
}

fn connect(server: &Server) -> TcpStream {
    let socket = TcpStream::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

fn converse(mut socket: impl Read + Write, sent: &str) -> (Vec<u8>, Option<std::io::ErrorKind>) {
    // The server may have answered and closed before all of it was sent.
    let _ = socket.write_all(sent.as_bytes());
    let mut all = Vec::new();
    let end = socket.read_to_end(&mut all).err().map(|problem| problem.kind());
    (all, end)
}
