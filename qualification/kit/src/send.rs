//! Sending an answer as a rule wants it: at once or in drips, all of it or not.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::answer::Answer;
use crate::body::fitting;
use crate::rule::{Drip, How, Rule};
use crate::wire::{Wire, linger, until_gone};

/// This much of a body is in memory at a time.
const PIECE: usize = 64 * 1024;
/// So long a peer may take to notice that the connection is closed.
const FAREWELL: Duration = Duration::from_millis(500);

/// How a connection goes on after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With the next request.
    KeepAlive,
    /// Not: `close_notify`, then FIN.
    Close,
    /// Not: FIN alone.
    Abrupt,
    /// Not: RST.
    Reset,
}

/// Sends an answer; tells how many bytes of the body are sent each time that it becomes more.
pub(crate) async fn send(
    wire: &mut dyn Wire,
    inbox: &mut Vec<u8>,
    mut answer: Answer,
    rule: &Rule,
    mut tell: impl FnMut(u64) + Send,
) -> io::Result<End> {
    if let Some(delay) = rule.delay_ms {
        linger(wire, inbox, Duration::from_millis(delay)).await?;
    }
    match rule.drip {
        Some(drip) if drip.head => drip_out(wire, inbox, &answer.head, drip).await?,
        _ => wire.write_all(&answer.head).await?,
    }
    let mut allowed = rule.cut.map_or(u64::MAX, |cut| cut.after);
    let mut sent = 0;
    let mut piece = vec![0; rule.drip.map_or(PIECE, |drip| drip.bytes.clamp(1, PIECE))];
    while allowed > 0 {
        let room = fitting(piece.len(), allowed);
        let count = answer.body.next(&mut piece[..room])?;
        if count == 0 {
            break;
        }
        if answer.chunked {
            wire.write_all(format!("{count:x}\r\n").as_bytes()).await?;
        }
        wire.write_all(&piece[..count]).await?;
        if answer.chunked {
            wire.write_all(b"\r\n").await?;
        }
        allowed -= count as u64;
        sent += count as u64;
        tell(sent);
        if let Some(drip) = rule.drip {
            wire.flush().await?;
            linger(wire, inbox, Duration::from_millis(drip.every_ms)).await?;
        }
    }
    if let Some(cut) = rule.cut.filter(|_| allowed == 0) {
        wire.flush().await?;
        return Ok(cut_off(wire, inbox, cut.how).await);
    }
    if answer.chunked {
        wire.write_all(b"0\r\n\r\n").await?;
    }
    wire.flush().await?;
    Ok(if answer.close { End::Close } else { End::KeepAlive })
}

async fn drip_out(wire: &mut dyn Wire, inbox: &mut Vec<u8>, bytes: &[u8], drip: Drip) -> io::Result<()> {
    for few in bytes.chunks(drip.bytes.max(1)) {
        wire.write_all(few).await?;
        wire.flush().await?;
        linger(wire, inbox, Duration::from_millis(drip.every_ms)).await?;
    }
    Ok(())
}

async fn cut_off(wire: &mut dyn Wire, inbox: &mut Vec<u8>, how: How) -> End {
    match how {
        How::Stall => {
            until_gone(wire, inbox).await;
            End::Abrupt
        }
        How::Close => End::Close,
        How::Abrupt => End::Abrupt,
        How::Reset => End::Reset,
    }
}

/// Ends a connection. What fails here is the peer's haste, and of no interest.
pub(crate) async fn end(wire: &mut dyn Wire, end: End) {
    match end {
        End::KeepAlive | End::Close => {
            let _ = wire.shutdown().await;
            drain(wire.tcp()).await;
        }
        End::Abrupt => {
            let _ = wire.tcp().shutdown().await;
            drain(wire.tcp()).await;
        }
        End::Reset => {
            // A reset throws away what is not yet acknowledged; the bytes before it are to arrive.
            tokio::time::sleep(Duration::from_millis(50)).await;
            let _ = wire.tcp().set_zero_linger();
        }
    }
}

/// Closing a socket with unread bytes in it is a reset, which would destroy the answer on its way.
async fn drain(tcp: &mut tokio::net::TcpStream) {
    let mut bytes = [0; 4096];
    let _ = timeout(FAREWELL, async { while !matches!(tcp.read(&mut bytes).await, Ok(0) | Err(_)) {} }).await;
}
