//! Gaining an identity, a capability, a namespace.

use std::fs;

use caps::{CapSet, Capability};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::unistd::{Gid, Uid, setgid, setgroups, setresuid, setuid};

use crate::Report;

/// Becomes another, gets capabilities, lifts its own limits.
pub(crate) fn gain(report: &mut Report) {
    let said = |()| String::new();
    for uid in [0, 1, 1000] {
        report.note(&format!("became uid {uid}"), setuid(Uid::from_raw(uid)).map(said));
        report.note(&format!("became gid {uid}"), setgid(Gid::from_raw(uid)).map(said));
    }
    let root = Uid::from_raw(0);
    report.note("became uid 0 again", setresuid(root, root, root).map(said));
    report.note("joined groups", setgroups(&[Gid::from_raw(0)]).map(said));
    for capability in caps::all() {
        for set in [CapSet::Permitted, CapSet::Effective, CapSet::Inheritable, CapSet::Ambient] {
            report.note(&format!("got {capability} {set:?}"), caps::raise(None, set, capability).map(said));
        }
    }
    for (name, resource) in [("FSIZE", Resource::RLIMIT_FSIZE), ("CORE", Resource::RLIMIT_CORE)] {
        report.note(&format!("lifted {name}"), setrlimit(resource, 1, 1).map(said));
        report.note(&format!("lifted {name}"), setrlimit(resource, 0, RLIM_INFINITY).map(said));
    }
    for (name, expected) in [
        ("NoNewPrivs", "1"),
        ("Groups", ""),
        ("CapInh", "0000000000000000"),
        ("CapPrm", "0000000000000000"),
        ("CapEff", "0000000000000000"),
        ("CapAmb", "0000000000000000"),
    ] {
        report.tried += 1;
        let found = status(name);
        if found != expected {
            report.worked.push(format!("{name} is {found:?}"));
        }
    }
}

fn status(name: &str) -> String {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim));
    line.unwrap_or("not there").to_owned()
}

/// Makes a user namespace, in which it has every capability over what it makes there, and tries what they give.
/// Whether a host allows one is the host's affair; what can be had of it is not.
pub(crate) fn namespaces(report: &mut Report) {
    let said = |()| String::new();
    let made = unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET);
    eprintln!(
        "a user namespace: {made:?}, CapEff there {}, CAP_SYS_ADMIN: {:?};",
        status("CapEff"),
        caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN)
    );
    let none: Option<&str> = None;
    report.note("mounted a tmpfs", mount(none, "/tmp", Some("tmpfs"), MsFlags::empty(), none).map(said));
    report.note("bound /tmp", mount(Some("/tmp"), "/mnt", none, MsFlags::MS_BIND, none).map(said));
    report.note(
        "made / private",
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).map(said),
    );
    report.note("made a file there", fs::File::create("/tmp/attacker-namespace").map(|_| String::new()));
    report.note("read /etc/shadow there", fs::read("/etc/shadow").map(|_| String::new()));
    report.note("became uid 0 there", setuid(Uid::from_raw(0)).map(said));
    report.note("lifted FSIZE there", setrlimit(Resource::RLIMIT_FSIZE, 1, 1).map(said));
}
