//! Making, changing and reading files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::libc;
use nix::mqueue::{MQ_OFlag, mq_open};
use nix::sys::stat::{Mode, SFlag, mknod};
use nix::unistd::mkfifo;

use crate::Report;

/// Where everyone, or this account, might be let write.
const PLACES: [&str; 16] = [
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/dev/mqueue",
    "/dev",
    "/run",
    "/run/lock",
    "/run/ployz",
    "/var/lib/ployz",
    "/var/lib/ployz-install",
    "/var/lib/ployz-install/attempts",
    "/usr/local/bin",
    "/usr/local/lib/ployz",
    "/usr/local/lib/systemd/system",
    "/etc/ployz",
    "/",
];
/// Trees in which every regular file is tried.
const TREES: [&str; 6] = ["/etc", "/usr/local", "/var/lib", "/var/log", "/var/spool", "/run"];
/// The most files that are tried there.
const MOST: usize = 20_000;
/// What only root, or only the daemon, may read.
const SECRETS: [&str; 11] = [
    "/etc/shadow",
    "/etc/ssh/ssh_host_ed25519_key",
    "/root/.ssh/authorized_keys",
    "/root/.bashrc",
    "/var/lib/ployz-install/admission.lock",
    "/var/lib/ployz-install/attempts",
    "/var/lib/ployz",
    "/var/lib/ployz/identity.json",
    "/proc/1/environ",
    "/proc/1/root/etc/shadow",
    "/proc/kcore",
];

/// Makes every kind of file wherever it might, and opens every file that it finds for writing.
pub(crate) fn write(report: &mut Report) {
    let own = std::env::current_exe().unwrap_or_default();
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let places = PLACES.iter().map(PathBuf::from).chain(own.parent().map(Path::to_owned)).chain(home);
    for place in places {
        make(report, &place);
    }
    for path in [own.as_path(), Path::new("/etc/passwd")] {
        let shown = path.display();
        report.note(
            &format!("truncated {shown}"),
            fs::OpenOptions::new().write(true).truncate(true).open(path).map(said),
        );
        report.note(&format!("renamed {shown}"), fs::rename(path, path.with_extension("x")).map(said));
        report.note(&format!("removed {shown}"), fs::remove_file(path).map(said));
    }
    let mut left = MOST;
    for tree in TREES {
        try_all(report, Path::new(tree), &mut left);
    }
    let queue = mq_open("/attacker", MQ_OFlag::O_CREAT | MQ_OFlag::O_RDWR, Mode::S_IRWXU, None);
    report.note("made a message queue", queue.map(said));
    let null = OpenOptions::new().write(true).open("/dev/null").and_then(|mut null| null.write_all(b"x"));
    if null.is_err() {
        report.worked.push("nothing can be thrown away: /dev/null is closed".into());
    }
}

fn said<T>(_: T) -> String {
    String::new()
}

/// Everything that can be made in a directory.
fn make(report: &mut Report, place: &Path) {
    let path = |kind: &str| place.join(format!("attacker-{kind}"));
    let all = Mode::from_bits_truncate(0o666);
    let io = |e: nix::Error| io::Error::from(e);
    let tries: [(&str, io::Result<()>); 8] = [
        ("file", File::create(path("file")).map(drop)),
        ("unnamed", OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(place).map(drop)),
        ("directory", fs::create_dir(path("directory"))),
        ("link", std::os::unix::fs::symlink("what is to be kept", path("link"))),
        ("hard-link", fs::hard_link(std::env::current_exe().unwrap_or_default(), path("hard-link"))),
        ("fifo", mkfifo(&path("fifo"), all).map_err(io)),
        ("socket", UnixListener::bind(path("socket")).map(drop)),
        ("device", mknod(&path("device"), SFlag::S_IFCHR, all, nix::sys::stat::makedev(1, 3)).map_err(io)),
    ];
    for (kind, tried) in tries {
        report.note(&format!("made a {kind} in {}", place.display()), tried.map(said));
    }
    // Bytes, by a file of its own, by a name, by a link.
    let bytes = OpenOptions::new().create(true).append(true).open(path("bytes"));
    report.note(
        &format!("wrote a byte in {}", place.display()),
        bytes.and_then(|mut f| f.write_all(b"x")).map(said),
    );
}

/// Opens every regular file below for writing.
fn try_all(report: &mut Report, directory: &Path, left: &mut usize) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            try_all(report, &entry.path(), left);
        } else if kind.is_file() && *left > 0 {
            *left -= 1;
            let options = OpenOptions::new().append(true).custom_flags(libc::O_NONBLOCK).open(entry.path());
            report.note(&format!("opened {} for writing", entry.path().display()), options.map(said));
        }
    }
}

/// Reads what is not for everyone.
pub(crate) fn read(report: &mut Report) {
    for path in SECRETS {
        report.note(&format!("read {path}"), fs::read(path).map(said));
        report.note(&format!("listed {path}"), fs::read_dir(path).map(said));
    }
    // By the names that are not secret: those of attempts are told to everyone who is refused.
    for entry in fs::read_dir("/usr/local/lib/ployz/staging").into_iter().flatten().flatten() {
        report.note("listed an attempt's staging", fs::read_dir(entry.path()).map(said));
    }
}
