//! The volume plugin: Docker's volume protocol on a socket that systemd holds, so that it stays open while the plugin is
//! replaced. What there is, is read from the filesystem at each request; nothing is remembered.
//!
//! 1. take the socket from systemd; 2. say READY; 3. serve one request a connection; 4. on SIGTERM finish what was
//!    accepted, and end: what has not been accepted waits in the socket for the next plugin.
//!
//! No request takes admission: a container with a volume starts during an upgrade. No request asks Docker: each would
//! wait for the other.

mod directory;
mod protocol;
mod using;
mod zfs;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use crate::host::Host;
use protocol::{Asked, Unanswerable};

/// Connections that are served at once; more wait in the socket.
const MOST_CONNECTIONS: u32 = 32;
/// For a whole request head.
const HEAD: Duration = Duration::from_secs(2);
/// For a whole request body, and its largest size in bytes.
const BODY: Duration = Duration::from_secs(2);
const MOST_BODY: usize = 64 * 1024;
/// For requests that are under way when the plugin is asked to end.
const DRAIN: Duration = Duration::from_secs(25);

/// Serves until SIGTERM.
///
/// # Errors
/// When it was not started by its socket unit, or the system refuses what it can't do without.
pub(crate) fn run(host: Host, version: &'static str) -> io::Result<()> {
    let listener = listenfd::ListenFd::from_env().take_unix_listener(0)?;
    let listener = listener.ok_or_else(|| io::Error::other("LISTEN_FDS is not set for this process"))?;
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served =
        runtime.block_on(serve(Arc::new(Plugin { host, version, names: Names::default() }), listener));
    runtime.shutdown_background();
    served
}

struct Plugin {
    host: Host,
    version: &'static str,
    names: Names,
}

/// One request at a time for each volume.
#[derive(Default)]
struct Names(Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl Names {
    async fn hold(&self, name: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            names.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(names.entry(name.to_owned()).or_default())
        };
        lock.lock_owned().await
    }
}

async fn serve(plugin: Arc<Plugin>, listener: StdListener) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = UnixListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS as usize));
    directory::sweep(&plugin.host);
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tracing::info!("ployzd {} serves volumes (pid {})", plugin.version, std::process::id());
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            biased;
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            next = next => next,
        };
        let (Ok(place), Ok((stream, _))) = (place, accepted) else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let plugin = Arc::clone(&plugin);
        tokio::spawn(async move {
            let _place = place;
            let service = service_fn(|request| answer(Arc::clone(&plugin), request));
            let mut builder = hyper::server::conn::http1::Builder::new();
            // An idle connection that is kept would break under its client when this process is replaced.
            builder.timer(TokioTimer::new()).header_read_timeout(HEAD).keep_alive(false);
            // A request that can't be answered ends its connection.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    drop(listener);
    if tokio::time::timeout(DRAIN, places.acquire_many(MOST_CONNECTIONS)).await.is_err() {
        tracing::warn!("requests were still under way after {} s", DRAIN.as_secs());
    }
    tracing::info!("ployzd {} ended as asked", plugin.version);
    Ok(())
}

/// Answers a request, or fails, which closes the connection without an answer. Docker takes any answered failure of a
/// look as "no such volume", and asks again where nothing was answered.
async fn answer(
    plugin: Arc<Plugin>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Unanswerable> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let body = tokio::time::timeout(BODY, Limited::new(request.into_body(), MOST_BODY).collect()).await;
    let Ok(Ok(body)) = body else { return Ok(with(400, "the request is not whole".into())) };
    let asked = match Asked::read(&path, &body.to_bytes()) {
        _ if method != Method::POST => return Ok(with(405, "only POST is served".into())),
        Ok(Some(asked)) => asked,
        Ok(None) => return Ok(with(404, format!("there is no {path}"))),
        Err(why) => return Ok(with(400, why)),
    };
    let held = match asked.volume() {
        Some(name) => Some(plugin.names.hold(name).await),
        None => None,
    };
    // A client that goes away does not end what was begun.
    let done = tokio::task::spawn_blocking(move || {
        let _held = held;
        asked.carry_out(&plugin.host, plugin.version)
    });
    match done.await {
        Ok(Ok(answer)) => Ok(with(200, answer.to_string())),
        Ok(Err(why)) => {
            tracing::warn!("{path} is left unanswered: {why}");
            Err(why)
        }
        Err(e) => Err(Unanswerable(e.to_string())),
    }
}

fn with(status: u16, body: String) -> Response<Full<Bytes>> {
    let answer = Response::builder()
        .status(status)
        .header("content-type", "application/vnd.docker.plugins.v1.2+json")
        .body(Full::new(Bytes::from(body)));
    answer.unwrap_or_else(|_: hyper::http::Error| Response::new(Full::default()))
}

/// A look at the plugin that listens at its socket: its version and process.
pub(crate) const ABOUT: &str = "/Plugin.Activate";
