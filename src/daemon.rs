//! The Machine daemon: unprivileged, behind a socket that systemd holds, serving the Machine API.
//!
//! 1. take the socket from systemd;
//! 2. read the identity (damage is reported, never fatal);
//! 3. serve, and say READY;
//! 4. finish a reset that was cut off, once admission is free, and have a Deploy that was cut off ended;
//! 5. on SIGTERM close idle connections, answer what is under way, end.

pub(crate) mod api;
pub(crate) mod identity;
mod services;
mod upgrades;

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener as StdListener;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use crate::host::Host;
use api::{Machine, Peer};

/// Connections at once, of root and of all others each; more are told to come again.
const MOST_CONNECTIONS: usize = 256;
/// What they are told.
const FULL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
/// For a whole request head.
const HEAD: Duration = Duration::from_secs(10);
/// For a client that has connected and not asked yet, when the daemon is asked to end.
const ABOUT_TO_ASK: Duration = Duration::from_millis(500);
/// For requests that are under way when the daemon is asked to end.
const DRAIN: Duration = Duration::from_secs(5);
/// Between two tries to finish a reset.
const RESET_AGAIN: Duration = Duration::from_secs(1);

/// Why the daemon can't serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DaemonError {
    /// It was not started by its socket unit.
    #[error("there is no listening socket from systemd: {0}")]
    NoSocket(String),
    /// The system refused something that it can't do without.
    #[error("serving the Machine API: {0}")]
    Io(#[from] io::Error),
}

/// Serves until SIGTERM.
pub(crate) fn run(host: Host, version: &'static str) -> Result<(), DaemonError> {
    let listener = socket()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(serve(host, version, listener));
    // A lookup at the release source that is under way is nobody's any more.
    runtime.shutdown_background();
    served
}

fn socket() -> Result<StdListener, DaemonError> {
    let refused = |why: &str| DaemonError::NoSocket(why.to_owned());
    let mut passed = listenfd::ListenFd::from_env();
    let listener = passed.take_unix_listener(0).map_err(|e| refused(&e.to_string()))?;
    let listener = listener.ok_or_else(|| refused("LISTEN_FDS is not set for this process"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn serve(host: Host, version: &'static str, listener: StdListener) -> Result<(), DaemonError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = UnixListener::from_std(listener)?;
    let machine = Arc::new(Machine::new(host, version));
    let router = api::router(Arc::clone(&machine));
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let root_places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let graceful = GracefulShutdown::new();

    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tracing::info!("ployzd {version} serves the Machine API (pid {})", std::process::id());
    let background = tokio::spawn(after_ready(Arc::clone(&machine)));

    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Out of descriptors, or the peer is gone already: neither is a reason to stop serving.
                tracing::warn!("accepting a connection: {e}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let peer = Peer::of(&stream);
        // Root has places of its own: nobody in group ployz can keep an installer from being answered.
        let places = if peer == Peer::Root { &root_places } else { &places };
        let Ok(permit) = Arc::clone(places).try_acquire_owned() else {
            let _ = stream.try_write(FULL);
            continue;
        };
        let service = TowerToHyperService::new(router.clone().layer(axum::Extension(peer)));
        let watcher = graceful.watcher();
        let ending = machine.ending();
        tokio::spawn(async move {
            let _place = permit;
            let mut builder = hyper::server::conn::http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(64 * 1024);
            // A client that goes away in the middle is its own affair.
            match first_byte(&stream, ending).await {
                Heard::Byte => {
                    let _ = watcher.watch(builder.serve_connection(TokioIo::new(stream), service)).await;
                }
                // Accepted, so it is answered, once: the next request is the next daemon's.
                Heard::ByteAtTheEnd => {
                    let one = builder.keep_alive(false).serve_connection(TokioIo::new(stream), service);
                    drop(tokio::time::timeout(DRAIN, one).await);
                    drop(watcher);
                }
                Heard::Nothing => {}
            }
        });
    }

    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    background.abort();
    machine.end();
    drop(listener);
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests were still under way after {} s", DRAIN.as_secs());
    }
    tracing::info!("ployzd {version} ended as asked");
    Ok(())
}

/// What was heard of a connection that was accepted.
enum Heard {
    /// A request has begun.
    Byte,
    /// A request has begun while the daemon was asked to end.
    ByteAtTheEnd,
    /// None has, in time.
    Nothing,
}

/// Waits for a connection's first byte. When the daemon is asked to end, a client that has connected and is about to
/// ask still gets a moment: it was let in, and would see a broken connection otherwise.
async fn first_byte(stream: &UnixStream, mut ending: tokio::sync::watch::Receiver<bool>) -> Heard {
    tokio::select! {
        biased;
        _ = ending.wait_for(|ending| *ending) => {}
        byte = tokio::time::timeout(HEAD, has_byte(stream)) => {
            return if byte == Ok(true) { Heard::Byte } else { Heard::Nothing };
        }
    }
    let byte = tokio::time::timeout(ABOUT_TO_ASK, has_byte(stream)).await;
    if byte == Ok(true) { Heard::ByteAtTheEnd } else { Heard::Nothing }
}

/// Waits until there is a byte to read, and leaves it there. Looked at, not believed: a socket that was just accepted
/// counts as readable until it has been read from.
async fn has_byte(stream: &UnixStream) -> bool {
    loop {
        if stream.readable().await.is_err() {
            return false;
        }
        let peek = || {
            recv(stream.as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT)
                .map_err(io::Error::from)
        };
        match stream.try_io(Interest::READABLE, peek) {
            Ok(bytes) => return bytes > 0,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
}

/// What need not be done before the first answer: the executable's digest, and a reset that was cut off.
async fn after_ready(machine: Arc<Machine>) {
    let digest = tokio::task::spawn_blocking(|| crate::durable::sha256_file("/proc/self/exe".as_ref())).await;
    if let Ok(Ok(digest)) = digest {
        machine.set_digest(digest);
    }
    let reset = async {
        while machine.resetting() {
            match machine.finish_reset() {
                Ok(()) => tracing::info!("a reset that was cut off is finished"),
                Err(e) => {
                    tracing::debug!("finishing a reset: {e}");
                    tokio::time::sleep(RESET_AGAIN).await;
                }
            }
        }
    };
    tokio::join!(reset, services::after_ready(&machine));
}
