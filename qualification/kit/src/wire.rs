//! A connection, encrypted or not, with the TCP socket below it within reach.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::server::TlsStream;

/// What a peer sent too early is kept up to this size.
const INBOX: usize = 64 * 1024;

/// A connection, encrypted or not.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Unpin + Send {
    /// The TCP socket.
    fn tcp(&mut self) -> &mut TcpStream;
}

impl Wire for TcpStream {
    fn tcp(&mut self) -> &mut TcpStream {
        self
    }
}

impl Wire for TlsStream<TcpStream> {
    fn tcp(&mut self) -> &mut TcpStream {
        self.get_mut().0
    }
}

/// Waits, but no longer than the peer stays: an error says that it went. What it sends meanwhile goes to the
/// inbox.
pub(crate) async fn linger(wire: &mut dyn Wire, inbox: &mut Vec<u8>, time: Duration) -> io::Result<()> {
    let end =
        Instant::now().checked_add(time).unwrap_or_else(|| Instant::now() + Duration::from_secs(1 << 30));
    while inbox.len() < INBOX {
        let mut bytes = [0; 4096];
        match timeout_at(end, wire.read(&mut bytes)).await {
            Err(_) => return Ok(()),
            Ok(Ok(0)) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed")),
            Ok(Ok(count)) => inbox.extend_from_slice(&bytes[..count]),
            Ok(Err(problem)) => return Err(problem),
        }
    }
    tokio::time::sleep_until(end).await;
    Ok(())
}

/// Waits until the peer goes.
pub(crate) async fn until_gone(wire: &mut dyn Wire, inbox: &mut Vec<u8>) {
    while linger(wire, inbox, Duration::from_secs(3600)).await.is_ok() {}
}
