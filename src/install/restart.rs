//! Restart: only what runs a replaced executable or whose unit changed. Sockets stay open.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use super::activation::Activated;
use super::admission::Admission;
use super::installed::Inode;
use super::units::kept_running;
use crate::command::CommandError;
use crate::systemd::{Systemd, Unit};

/// What a restart did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Restarted {
    /// Services that were started or restarted.
    pub(crate) services: Vec<String>,
    /// Sockets that had to be opened, or closed and opened again.
    pub(crate) sockets: Vec<String>,
    /// Whether one of them was open before: for a moment connections were refused there.
    pub(crate) refused: bool,
    /// Automatic restarts that the daemon's service had before.
    pub(crate) restarts_before: u32,
    /// The other services that run the executable, and their automatic restarts before.
    pub(crate) others: Vec<(String, u32)>,
    /// The volumes that were mounted before.
    pub(crate) mounted: Vec<(String, String)>,
    /// The daemon's main process, if its restart was asked for.
    pub(crate) replaced_pid: Option<u32>,
    /// For how long the daemon's main process had run, when it was looked at.
    pub(crate) age: Duration,
}

/// What has to be done for one socket and its service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Need {
    socket: bool,
    service: bool,
}

/// Starts what is down and restarts what is stale; jobs of services are queued, confirmation waits for them.
pub(crate) fn restart(
    systemd: Systemd,
    activated: &Activated,
    _admission: &Admission,
) -> Result<Restarted, CommandError> {
    let (sockets, services) = kept_running(&activated.units);
    let mut restarted = Restarted::default();
    let service_states = systemd.show(&services)?;
    let socket_states = systemd.show(&sockets)?;
    // Sockets that start an instance for each connection: instances that serve one are let be.
    for (name, state) in sockets.iter().zip(&socket_states) {
        let own_service = name.replace(".socket", ".service");
        if !services.iter().any(|service| *service == own_service)
            && (state.active != "active"
                || !is_there(&state.listen)
                || activated.changed_units.iter().any(|changed| changed == name))
        {
            reopen(systemd, name, state, None)?;
            restarted.sockets.push((*name).to_owned());
            restarted.refused |= state.active == "active";
        }
    }
    for (service, state) in services.iter().zip(&service_states) {
        let socket = service.replace(".service", ".socket");
        let held =
            sockets.iter().position(|name| *name == socket).map(|at| (sockets[at], &socket_states[at]));
        let running = Inode::of(&PathBuf::from(format!("/proc/{}/exe", state.main_pid))).ok();
        let need = Need {
            socket: held.is_some_and(|(name, state)| {
                state.active != "active"
                    || !listens(&state.listen)
                    || activated.changed_units.iter().any(|changed| changed == name)
            }),
            service: state.active != "active"
                || running != Some(activated.executable)
                || activated.changed_units.iter().any(|changed| changed == service),
        };
        if *service == super::units::SERVICE {
            restarted.restarts_before = state.restarts;
            restarted.age = state.age();
        } else {
            restarted.others.push(((*service).to_owned(), state.restarts));
        }
        if let Some((name, socket_state)) = held.filter(|_| need.socket) {
            reopen(systemd, name, socket_state, Some(service))?;
            restarted.sockets.push(name.to_owned());
            restarted.refused |= socket_state.active == "active";
        }
        if need.service || need.socket {
            if state.active == "failed" {
                systemd.reset_failed(&[service])?;
            }
            systemd.queue_restart(service)?;
            if *service == super::units::SERVICE && state.main_pid != 0 {
                restarted.replaced_pid = Some(state.main_pid);
            }
            restarted.services.push((*service).to_owned());
        }
    }
    Ok(restarted)
}

/// Opens a socket that is closed or changed. Restarting it under its active service would leave it dead, so both are
/// stopped in one transaction first.
fn reopen(systemd: Systemd, socket: &str, state: &Unit, service: Option<&str>) -> Result<(), CommandError> {
    let mut stopped: Vec<&str> = service.into_iter().collect();
    if state.active != "inactive" || state.load != "loaded" {
        stopped.insert(0, socket);
    }
    if !stopped.is_empty() {
        systemd.stop(&stopped)?;
    }
    if state.active == "failed" {
        systemd.reset_failed(&[socket])?;
    }
    systemd.start(&[socket])
}

/// Whether every path that a socket listens on leads to a socket. Connecting to this kind would start a worker.
fn is_there(paths: &[String]) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = |path: &String| std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    paths.iter().filter(|path| path.starts_with('/')).all(is_socket)
}

/// Whether a connection to every path that a socket listens on would be taken: an `active` socket may have no listener
/// any more.
fn listens(paths: &[String]) -> bool {
    paths.iter().filter(|path| path.starts_with('/')).all(|path| {
        let connected = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .and_then(|socket| connect(socket.as_raw_fd(), &UnixAddr::new(path.as_str())?));
        // A full backlog is a listener too.
        matches!(connected, Ok(()) | Err(Errno::EAGAIN))
    })
}
