//! Preflight: what must be true before anything is replaced. All problems at once, each with what to type.

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use nix::sys::statvfs::{FsFlags, statvfs};
use serde::{Deserialize, Serialize};

use super::confine;
use super::installed::Inventory;
use super::release::Version;
use super::units::{self, EXECUTABLE, SERVICE, Unit};
use crate::command::CommandError;
use crate::durable::writable_by_others;
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::systemd::Systemd;

/// Kept free beside what is written, in bytes.
const RESERVE: u64 = 64 * 1024 * 1024;

/// What a binary says of itself (`ployzd version --json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its version.
    pub version: String,
    /// The machine that it was built for: `x86_64-linux`.
    #[serde(default)]
    pub target: String,
    /// What it needs of the host.
    #[serde(default)]
    pub requires: Requires,
}

/// What a release needs of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requires {
    /// The oldest systemd.
    pub systemd: Option<u32>,
}

impl About {
    /// This release.
    pub fn this(version: &str) -> Self {
        Self {
            version: version.to_owned(),
            target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            requires: Requires { systemd: Some(252) },
        }
    }
}

/// One thing that is in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What was observed.
    pub what: String,
    /// What to type or change.
    pub help: String,
}

impl Problem {
    pub(crate) fn new(what: impl Into<String>, help: impl Into<String>) -> Self {
        Self { what: what.into(), help: help.into() }
    }
}

/// Looks at the host before anything is fetched: can the files be replaced here, and will systemd start them?
pub(crate) fn host_problems(host: &Host, systemd: Option<Systemd>, bytes: u64) -> Vec<Problem> {
    let mut problems = Vec::new();
    for dir in [host.bin(), host.lib(), host.units()] {
        problems.extend(filesystem_problems(&dir, bytes));
    }
    if systemd.is_some() {
        for dir in [host.bin(), host.units()] {
            problems.extend(boot_problem(host, &dir));
        }
    }
    let (inventory, _) = Inventory::read(host);
    let enables = units::shipped().iter().any(|unit| unit.enable && !inventory.units.contains(&unit.name));
    // A worker sees it read-only whatever it is, and has PID 1 make the links; PID 1's own view is what counts.
    if enables && is_read_only(&host.as_pid_1_sees(&host.admin_units())) {
        problems.push(Problem::new(
            format!("{} is read-only, and units have to be enabled there", host.admin_units().display()),
            "make it writable for the installation: findmnt -T /etc/systemd/system",
        ));
    }
    if host.privileged() {
        problems.extend(owner_problems(host));
        problems.extend(super::host::foreign_accounts(host));
    }
    problems.dedup();
    match std::fs::symlink_metadata(host.installed()) {
        Ok(meta) if meta.is_dir() || meta.is_symlink() => problems.push(Problem::new(
            format!("{} is not a regular file", host.installed().display()),
            format!("move it away: mv {EXECUTABLE} {EXECUTABLE}.moved"),
        )),
        _ => {}
    }
    match systemd {
        Some(systemd) => problems.extend(unit_problems(host, systemd, &units::shipped())),
        None => problems.extend(units::shipped().iter().filter_map(|unit| masked(host, &unit.name))),
    }
    problems
}

/// What exists of a directory or above it: that decides what can be written there.
fn nearest(dir: &Path) -> Option<&Path> {
    dir.ancestors().find(|path| path.exists())
}

pub(super) fn filesystem_problems(dir: &Path, bytes: u64) -> Vec<Problem> {
    let Some(existing) = nearest(dir) else { return Vec::new() };
    let shown = existing.display();
    let stat = match statvfs(existing) {
        Ok(stat) => stat,
        Err(e) => return vec![Problem::new(format!("{shown} can't be looked at: {e}"), "look at: findmnt")],
    };
    let mut problems = Vec::new();
    if stat.flags().contains(FsFlags::ST_RDONLY) {
        problems.push(Problem::new(
            format!("{shown} is mounted read-only"),
            format!("remount it: mount -o remount,rw {shown}"),
        ));
    }
    if stat.flags().contains(FsFlags::ST_NOEXEC) {
        problems.push(Problem::new(
            format!("{shown} is mounted noexec, so what is installed there can't run"),
            format!("remount it: mount -o remount,exec {shown}"),
        ));
    }
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free < bytes + RESERVE {
        let mib = |n: u64| n.div_ceil(1024 * 1024);
        let what = format!("{shown} has {} MiB free, and {} MiB are needed", mib(free), mib(bytes + RESERVE));
        problems.push(Problem::new(what, format!("make room, then look again: df -h {shown}")));
    }
    problems
}

fn is_read_only(dir: &Path) -> bool {
    nearest(dir)
        .and_then(|path| statvfs(path).ok())
        .is_some_and(|stat| stat.flags().contains(FsFlags::ST_RDONLY))
}

/// What root is about to trust, others must not be able to change. Groups are the administrator's affair (`staff` on
/// Debian's `/usr/local`).
pub(super) fn owner_problems(host: &Host) -> Vec<Problem> {
    let (settings, state) = (host.settings(), host.install_state());
    let settings_dir = settings.parent().map(Path::to_owned);
    let ours = [
        host.bin(),
        host.lib(),
        host.staging(),
        host.own_copies(),
        host.units(),
        state,
        host.attempts(),
        settings,
    ];
    let ours = ours.into_iter().chain(settings_dir);
    let help =
        |path: &Path| format!("give it back to root: chown root: {0} && chmod o-w {0}", path.display());
    ours.filter_map(|path| writable_by_others(&path).map(|what| Problem::new(what, help(&path)))).collect()
}

/// Units and what they start must be there when systemd looks for them at boot, before other filesystems are mounted.
pub(super) fn boot_problem(host: &Host, dir: &Path) -> Option<Problem> {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| std::fs::metadata(path).map(|meta| meta.dev()).ok();
    let existing = nearest(dir)?;
    let early = [device(&host.root()), device(&host.usr())];
    let own = device(existing)?;
    (!early.contains(&Some(own))).then(|| {
        let shown = existing.display();
        Problem::new(
            format!("{shown} is on a filesystem of its own, which may not be mounted yet when systemd starts units at boot"),
            format!("put {shown} on the filesystem of / or /usr: findmnt -T {shown}"),
        )
    })
}

/// A mask that a system that is not running has for a unit of ours: it would not start with its next boot.
fn masked(host: &Host, name: &str) -> Option<Problem> {
    let mask = host.admin_units().join(name);
    let masked = std::fs::read_link(&mask).is_ok_and(|to| to == Path::new("/dev/null"));
    masked.then(|| Problem::new(format!("{name} is masked"), format!("unmask it: rm {}", mask.display())))
}

/// An administrator's file in the place of a template, which systemd can't be asked about.
fn shadowed(host: &Host, name: &str) -> Option<Problem> {
    masked(host, name).or_else(|| {
        let (file, own) = (host.admin_units().join(name), host.unit(name));
        std::fs::symlink_metadata(&file).is_ok().then(|| {
            let (file, own) = (file.display(), own.display());
            Problem::new(
                format!("{file} is in effect instead of {own}"),
                format!("move it away: mv {file} {file}.moved && systemctl daemon-reload"),
            )
        })
    })
}

/// What stands between a unit file of ours and what systemd does with it.
pub(super) fn unit_problems(host: &Host, systemd: Systemd, units: &[Unit]) -> Vec<Problem> {
    let names = units::loadable(units);
    let shown = match systemd.show(&names) {
        Ok(shown) => shown,
        Err(e) => {
            return vec![Problem::new(format!("systemd can't be asked: {e}"), "look at: systemctl status")];
        }
    };
    let mut problems: Vec<Problem> = units
        .iter()
        .filter(|unit| unit.name.contains('@'))
        .filter_map(|unit| shadowed(host, &unit.name))
        .collect();
    for (name, unit) in names.iter().zip(&shown) {
        let own = host.unit(name);
        if unit.load == "masked" {
            problems.push(Problem::new(
                format!("{name} is masked"),
                format!("unmask it: systemctl unmask {name}"),
            ));
        } else if matches!(unit.load.as_str(), "bad-setting" | "error") && !is_replaced(host, units, name) {
            problems.push(Problem::new(
                format!("systemd can't load {name} ({}), so it would not start", unit.load),
                format!("see what is wrong with it, or with a drop-in: systemctl status {name}; systemctl cat {name}"),
            ));
        } else if !unit.fragment.is_empty() && Path::new(&unit.fragment) != own {
            problems.push(Problem::new(
                format!("{} is in effect instead of {}", unit.fragment, own.display()),
                format!("move it away: mv {0} {0}.moved && systemctl daemon-reload", unit.fragment),
            ));
        }
        if *name == SERVICE && unit.load == "loaded" {
            for started in unit.exec_start.iter().filter(|path| *path != EXECUTABLE) {
                problems.push(Problem::new(
                    format!("{name} starts {started}, not {EXECUTABLE}"),
                    format!("remove the override: systemctl revert {name}"),
                ));
            }
        }
    }
    problems
}

/// Whether the file of a unit is going to be replaced: what is wrong with it now goes with it.
fn is_replaced(host: &Host, units: &[Unit], name: &str) -> bool {
    units::differing(host, units).iter().any(|unit| unit.name == name)
}

/// Why a staged binary is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    /// A stable word.
    pub(crate) reason: &'static str,
    /// What was observed.
    pub(crate) error: String,
}

/// Runs a staged binary, unprivileged, with an empty environment, and asks who it is. Anything but its version within
/// the deadline refuses it.
pub(crate) fn ask_version(
    host: &Host,
    binary: &Path,
    deadline: Duration,
    interrupt: &Interrupt,
) -> Result<About, Refused> {
    let ask = |arguments: &[&str]| {
        confine::untrusted(host, binary, arguments, deadline, interrupt).most_output(64 * 1024).check()
    };
    let refused = |e: CommandError| match e {
        CommandError::Cancelled { signal } => {
            Refused { reason: "cancelled", error: format!("cancelled by {signal}") }
        }
        CommandError::Deadline { .. } => Refused { reason: "hangs", error: format!("the new binary: {e}") },
        e => Refused { reason: "does_not_run", error: format!("the new binary does not run here: {e}") },
    };
    if let Some(error) = for_another_processor(binary) {
        return Err(Refused { reason: "architecture", error });
    }
    let stdout = match ask(&["version", "--json"]) {
        Ok(ended) => ended.stdout,
        Err(CommandError::Status { status, .. }) if status.code() == Some(2) => {
            // A release that does not know the flag.
            ask(&["version"]).map_err(refused)?.stdout
        }
        Err(e) => return Err(refused(e)),
    };
    read_about(&stdout)
}

/// Reads what a binary says of itself: JSON, or the last word of a line.
pub(super) fn read_about(stdout: &[u8]) -> Result<About, Refused> {
    if let Ok(about) = serde_json::from_slice(stdout) {
        return Ok(about);
    }
    let text = String::from_utf8_lossy(stdout);
    let word = text.lines().next().and_then(|line| line.split_whitespace().last()).unwrap_or_default();
    match word.parse::<Version>() {
        Ok(version) => {
            Ok(About { version: version.to_string(), target: String::new(), requires: Requires::default() })
        }
        Err(_) => {
            let seen: String = text.chars().take(80).collect();
            Err(Refused {
                reason: "no_version",
                error: format!("the new binary says {seen:?}, not its version"),
            })
        }
    }
}

/// A program for another processor, by its ELF header: one that a kernel may emulate, and else would only say "Exec
/// format error".
fn for_another_processor(binary: &Path) -> Option<String> {
    let machine = |path: &Path| {
        let mut header = [0; 20];
        std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut header)).ok()?;
        // Little-endian, as everything that a release is made for.
        header.starts_with(b"\x7fELF").then(|| u16::from_le_bytes([header[18], header[19]]))
    };
    let (found, own) = (machine(binary)?, machine(Path::new("/proc/self/exe"))?);
    let here = std::env::consts::ARCH;
    (found != own).then(|| {
        format!("the new binary is for another processor (ELF machine {found}, and {own} is that of {here})")
    })
}

/// What a binary requires and this host does not have.
pub(crate) fn requirements(about: &About, systemd: Option<Systemd>) -> Vec<Problem> {
    let Some((systemd, needed)) = systemd.zip(about.requires.systemd) else { return Vec::new() };
    match systemd.version() {
        Ok(found) if found >= needed => Vec::new(),
        Ok(found) => vec![Problem::new(
            format!("release {} needs systemd {needed}, and this Machine has {found}", about.version),
            "install an older release, or upgrade the host's systemd as part of its own maintenance",
        )],
        Err(e) => vec![Problem::new(
            format!("systemd's version can't be read: {e}"),
            "look at: systemctl --version",
        )],
    }
}
