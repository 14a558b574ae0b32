//! What an untrusted child takes from itself before it does anything: capabilities, new privileges, the right to make
//! or change a file, what its parent had open. Its uid and gid were set by the parent at spawn.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};

use crate::command::Run;
use crate::host::Host;
use crate::interrupt::Interrupt;

/// Confines this process and what it will exec: no capability, `no_new_privs`, nothing open but its three standard
/// streams, no byte can be written to a file (pipes and sockets are not files to `RLIMIT_FSIZE`), and where the kernel
/// has Landlock, no file of any kind can be made, opened for writing or removed.
///
/// # Errors
/// The system's: nothing untrusted may be done then.
pub(crate) fn confine() -> io::Result<()> {
    close_inherited()?;
    prctl::set_no_new_privs()?;
    for set in
        [caps::CapSet::Effective, caps::CapSet::Permitted, caps::CapSet::Inheritable, caps::CapSet::Ambient]
    {
        // What is not there need not be taken, and where capabilities may not even be set there is none.
        if !caps::read(None, set).map_err(io::Error::other)?.is_empty() {
            caps::clear(None, set).map_err(io::Error::other)?;
        }
    }
    setrlimit(Resource::RLIMIT_FSIZE, 0, 0)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // Message queues are kept by the kernel, whoever made them ends.
    setrlimit(Resource::RLIMIT_MSGQUEUE, 0, 0)?;
    leave_files_alone().map_err(io::Error::other)
}

/// Closes what whoever started the installer had left open, which may be anything of root's. Nothing here is ours yet.
fn close_inherited() -> io::Result<()> {
    let open: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for fd in open.into_iter().filter(|fd| *fd > 2) {
        // One of them was that of the list, and is closed.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}

/// An account that owns nothing may still leave an empty file, a link with a text in it, a socket, wherever everyone
/// may. Where the kernel has no Landlock, or an older one, as much of this holds as it knows.
fn leave_files_alone() -> Result<(), RulesetError> {
    let abi = ABI::V6;
    let mut rules =
        Ruleset::default().handle_access(AccessFs::from_write(abi))?.scope(Scope::from_all(abi))?.create()?;
    if let Ok(null) = PathFd::new("/dev/null") {
        rules = rules.add_rule(PathBeneath::new(null, AccessFs::WriteFile))?;
    }
    rules.restrict_self().map(drop)
}

/// Also keeps processes of the same uid away from this one's memory. An exec resets it.
pub(crate) fn hide() -> io::Result<()> {
    Ok(prctl::set_dumpable(false)?)
}

/// Confines this process and becomes `target`. Returns only when that did not work.
pub(crate) fn become_confined(target: &[OsString]) -> io::Error {
    let Some((program, arguments)) = target.split_first() else { return io::Error::other("nothing to run") };
    match confine() {
        Ok(()) => Command::new(program).args(arguments).env_clear().exec(),
        Err(e) => e,
    }
}

/// A program that is not trusted yet, run as it must be: confined, as the account that owns nothing, and with whatever
/// it starts ended after it.
pub(crate) fn untrusted<'a>(
    host: &Host,
    program: &Path,
    arguments: &[&str],
    deadline: Duration,
    interrupt: &'a Interrupt,
) -> Run<'a> {
    let run = Run::new(host.program(), deadline).args(["confine", "--"]).args([program]).args(arguments);
    run.account(host.untrusted()).contained().interrupt(interrupt)
}
