//! A server that runs in a thread of its own until it is dropped.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, oneshot};
use tokio_rustls::TlsAcceptor;

use crate::certificates::{Ca, Kind};
use crate::connection::{Shared, serve};
use crate::control::{self, RulesFile};
use crate::log::{Event, Log, Record};
use crate::rule::Rule;
use crate::rules::Rules;

/// So many connections are served at once; more wait.
const CONNECTIONS: usize = 4096;

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory that is served.
    pub root: PathBuf,
    /// Encrypted or not, and with which certificate.
    pub tls: Tls,
    /// Where to listen: a loopback or lab address.
    pub listen: SocketAddr,
    /// Who signs the certificate; by default the authority of this process.
    pub ca: Option<Ca>,
    /// A file to which each request is appended as a line of JSON.
    pub log: Option<PathBuf>,
    /// A file of rules that are applied again whenever it changes; it need not be there.
    pub rules: Option<PathBuf>,
    /// Where to listen for control: a Unix socket that speaks HTTP, with `GET`, `PUT`, `POST` and `DELETE` of
    /// `/_rules`, `GET` and `DELETE` of `/_log`.
    pub control: Option<PathBuf>,
    /// What is called when something is worth telling, as a rules file that can't be read.
    pub notice: fn(&str),
}

/// Encrypted or not, and with which certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    /// HTTPS with a good certificate.
    #[default]
    Good,
    /// HTTPS with a certificate that has expired.
    Expired,
    /// HTTPS with a certificate of the future.
    NotYetValid,
    /// HTTPS with a certificate for another name.
    WrongName,
    /// HTTPS with a certificate of an authority that nobody knows.
    UnknownIssuer,
    /// HTTP.
    Plain,
}

/// A running server. It stops when it is dropped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    tls: Tls,
    ca: Ca,
    /// Dropped to stop.
    stop: Option<oneshot::Sender<()>>,
    control: Option<PathBuf>,
    thread: Option<JoinHandle<()>>,
}

impl Options {
    /// HTTPS with a good certificate on a free port of 127.0.0.1.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let listen = (Ipv4Addr::LOCALHOST, 0).into();
        Self {
            root: root.into(),
            tls: Tls::Good,
            listen,
            ca: None,
            log: None,
            rules: None,
            control: None,
            notice: |_| {},
        }
    }

    /// The same, encrypted in another way.
    #[must_use]
    pub fn tls(self, tls: Tls) -> Self {
        Self { tls, ..self }
    }
}

impl Server {
    /// Starts a server; when this returns, it listens.
    ///
    /// # Errors
    /// When the address is neither loopback nor lab, or can't be bound; when there is no such directory; when
    /// the rules are none.
    pub fn start(options: Options) -> io::Result<Self> {
        let Options { root, tls, listen, ca, log, rules, control, notice } = options;
        if !is_permitted(listen.ip()) {
            return Err(io::Error::other(format!(
                "refusing to listen on {listen}: neither loopback nor lab"
            )));
        }
        if !root.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("no directory {}", root.display())));
        }
        let ca = ca.map_or_else(Ca::of_this_process, Ok)?;
        let acceptor = match tls.kind() {
            Some(kind) => Some(TlsAcceptor::from(Arc::new(ca.server(kind, listen.ip())?))),
            None => None,
        };
        let log = Log::to_file(log.as_deref()).map_err(|problem| doing("opening the log", &problem))?;
        let shared = Arc::new(Shared { root, rules: Rules::default(), log });
        let rules = match rules {
            Some(path) => {
                let what = format!("reading {}", path.display());
                let (file, rules) = RulesFile::open(path).map_err(|problem| doing(what, &problem))?;
                shared.rules.replace(rules);
                Some(file)
            }
            None => None,
        };
        let listener =
            TcpListener::bind(listen).map_err(|problem| doing(format!("listening on {listen}"), &problem))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let controller = control.as_deref().map(control::bind).transpose();
        let controller = controller.map_err(|problem| doing("listening on the control socket", &problem))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let serving = Arc::clone(&shared);
        let thread = thread::Builder::new().name("release-server".to_owned()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept_all(listener, acceptor, Arc::clone(&serving)) => {}
                    () = maybe(rules.map(|file| file.follow(Arc::clone(&serving), notice))) => {}
                    () = maybe(controller.map(|socket| control::serve(socket, Arc::clone(&serving)))) => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self { shared, address, tls, ca, stop: Some(stop), control, thread: Some(thread) })
    }

    /// `https://127.0.0.1:PORT`, without a slash at the end.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.tls == Tls::Plain { "http" } else { "https" };
        format!("{scheme}://{}", self.address)
    }

    /// The directory that is served.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.shared.root
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The certificate of the authority that a client is to trust.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        self.ca.pem()
    }

    /// Writes that certificate into a file, for clients that want one.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn write_ca(&self, path: impl AsRef<Path>) -> io::Result<()> {
        std::fs::write(path, self.ca_pem())
    }

    /// Adds a rule behind those that are there.
    pub fn rule(&self, rule: Rule) {
        self.shared.rules.add(rule);
    }

    /// Puts these rules in the place of all; none makes the server good again.
    pub fn set_rules(&self, rules: Vec<Rule>) {
        self.shared.rules.replace(rules);
    }

    /// The rules, each with the number of requests that it was applied to.
    #[must_use]
    pub fn rules(&self) -> Vec<(Rule, u64)> {
        self.shared.rules.list()
    }

    /// All requests so far (the newest ten thousand), the unfinished ones among them.
    #[must_use]
    pub fn requests(&self) -> Vec<Record> {
        self.records().into_iter().filter(|record| record.event == Event::Request).collect()
    }

    /// All requests for a path.
    #[must_use]
    pub fn requests_for(&self, path: &str) -> Vec<Record> {
        self.requests().into_iter().filter(|record| record.path == path).collect()
    }

    /// Everything so far: requests, connections that a rule turned away, handshakes that failed.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.shared.log.records()
    }

    /// Waits (at most five seconds) until nothing is being answered, then all requests so far: a client has
    /// its answer a moment before the server has counted the bytes.
    #[must_use]
    pub fn settled(&self) -> Vec<Record> {
        let end = Instant::now() + Duration::from_secs(5);
        while !self.shared.log.is_settled() && Instant::now() < end {
            thread::sleep(Duration::from_millis(2));
        }
        self.requests()
    }

    /// Forgets what was asked so far.
    pub fn forget(&self) {
        self.shared.log.clear();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It ended by a panic at worst, which was reported when it happened.
            let _ = thread.join();
        }
        if let Some(control) = &self.control {
            let _ = std::fs::remove_file(control);
        }
    }
}

impl Tls {
    fn kind(self) -> Option<Kind> {
        match self {
            Self::Good => Some(Kind::Good),
            Self::Expired => Some(Kind::Expired),
            Self::NotYetValid => Some(Kind::NotYetValid),
            Self::WrongName => Some(Kind::WrongName),
            Self::UnknownIssuer => Some(Kind::UnknownIssuer),
            Self::Plain => None,
        }
    }
}

/// An error that says what was being done.
fn doing(what: impl Display, problem: &io::Error) -> io::Error {
    io::Error::new(problem.kind(), format!("{what}: {problem}"))
}

/// What there is to run, or nothing for ever.
async fn maybe(task: Option<impl Future<Output = ()>>) {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

/// Loopback, or the network of the test machines: a server that misbehaves is nothing for other networks.
fn is_permitted(address: IpAddr) -> bool {
    address.is_loopback() || matches!(address, IpAddr::V4(address) if address.octets()[..2] == [10, 77])
}

async fn accept_all(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    for number in 1.. {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let (tcp, peer) = loop {
            match listener.accept().await {
                Ok(accepted) => break accepted,
                // Out of descriptors, or a peer that is gone already: both pass.
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        let (shared, tls) = (Arc::clone(&shared), tls.clone());
        tokio::spawn(async move {
            serve(shared, tcp, tls, peer, number).await;
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_and_lab() {
        for (address, permitted) in [
            ("127.0.0.1", true),
            ("127.1.2.3", true),
            ("::1", true),
            ("10.77.0.1", true),
            ("10.78.0.1", false),
            ("0.0.0.0", false),
            ("::", false),
            ("192.168.1.1", false),
        ] {
            assert_eq!(is_permitted(address.parse().unwrap()), permitted, "{address}");
        }
    }
}
