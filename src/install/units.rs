//! The units that a release brings: what this release ships, what a staged release says it ships, and what is on disk.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::admission::Admission;
use super::confine;
use crate::durable::{make_dir, read_bounded, sync_parent, write_whole};
use crate::host::{Account, Host};
use crate::interrupt::Interrupt;
use crate::systemd::Systemd;

/// The service that runs the daemon.
pub(crate) const SERVICE: &str = "ployz.service";
/// The socket that it serves on.
pub(crate) const SOCKET: &str = "ployz.socket";
/// The socket at which the daemon asks for an upgrade.
pub(crate) const DOOR: &str = "ployz-upgrade.socket";
/// The template of the service that serves one connection of the door.
pub(crate) const WORKER: &str = "ployz-upgrade@.service";
/// The socket at which the daemon asks for a Deploy.
pub(crate) const DEPLOY_DOOR: &str = "ployz-deploy.socket";
/// The services that serve one connection of it each, as a pattern.
pub(crate) const DEPLOY_WORKERS: &str = "ployz-deploy@*.service";
/// The socket of the volume plugin.
pub(crate) const PLUGIN_SOCKET: &str = "ployz-volume-plugin.socket";
/// The service behind it.
pub(crate) const PLUGIN: &str = "ployz-volume-plugin.service";
/// The executable that shipped units start.
pub(crate) const EXECUTABLE: &str = "/usr/local/bin/ployzd";
/// The account declarations of this release.
pub(crate) const SYSUSERS: &str = include_str!("../../hardening/sysusers.conf");

const MOST_UNITS: usize = 32;
const MOST_UNIT: usize = 32 * 1024;

/// A unit file, and what a first installation does with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// `ployz*.service` or `ployz*.socket`.
    pub name: String,
    /// The whole file.
    pub content: String,
    /// Whether a first installation enables it.
    pub enable: bool,
    /// Whether it is started, and kept running over an upgrade.
    pub start: bool,
}

/// The units of this release, sockets before the services that they start.
pub fn shipped() -> Vec<Unit> {
    let unit = |name: &str, content: &str| Unit {
        name: name.into(),
        content: content.into(),
        enable: true,
        start: true,
    };
    vec![
        unit(SOCKET, include_str!("../../hardening/ployz.socket")),
        unit(DOOR, include_str!("../../hardening/ployz-upgrade.socket")),
        unit(DEPLOY_DOOR, include_str!("../../hardening/ployz-deploy.socket")),
        unit(PLUGIN_SOCKET, include_str!("../../hardening/ployz-volume-plugin.socket")),
        unit(SERVICE, include_str!("../../hardening/ployz.service")),
        unit(PLUGIN, include_str!("../../hardening/ployz-volume-plugin.service")),
        Unit {
            enable: false,
            start: false,
            ..unit("ployz-deploy@.service", include_str!("../../hardening/ployz-deploy@.service"))
        },
        Unit {
            enable: false,
            start: false,
            ..unit(WORKER, include_str!("../../hardening/ployz-upgrade@.service"))
        },
    ]
}

/// Asks a staged binary for its units, unprivileged and bounded. `None` when it is too old to answer.
pub(crate) fn ask(
    host: &Host,
    binary: &Path,
    deadline: Duration,
    interrupt: &Interrupt,
) -> Result<Option<Vec<Unit>>, String> {
    let run = confine::untrusted(host, binary, &["units", "--json"], deadline, interrupt);
    let ended = match run.most_output(MOST_UNITS * MOST_UNIT).run() {
        Ok(ended) if ended.status.success() => ended,
        // What it says to a verb that it does not know.
        Ok(ended) if ended.status.code() == Some(2) => return Ok(None),
        Ok(ended) => {
            let how = crate::command::how(&ended.status);
            let said = crate::text::printable(&ended.stderr);
            return Err(format!("the new binary was asked for its units and {how}: {said}"));
        }
        Err(e) => return Err(format!("asking the new binary for its units: {e}")),
    };
    read(&ended.stdout).map(Some)
}

/// Reads and checks what a binary says of its units.
pub(super) fn read(text: &[u8]) -> Result<Vec<Unit>, String> {
    let units: Vec<Unit> = serde_json::from_slice(text)
        .map_err(|e| format!("what the new binary says of its units is not understood: {e}"))?;
    if units.is_empty() || units.len() > MOST_UNITS {
        return Err(format!("the new binary brings {} units", units.len()));
    }
    let mut names = BTreeSet::new();
    for unit in &units {
        let stem = unit.name.strip_suffix(".service").or_else(|| unit.name.strip_suffix(".socket"));
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'@';
        if !stem.is_some_and(|s| s.starts_with("ployz") && s.len() <= 64 && s.bytes().all(plain)) {
            let shown: String = unit.name.chars().take(80).collect();
            return Err(format!("the new binary brings a unit named {shown:?}"));
        }
        if unit.content.len() > MOST_UNIT || unit.content.contains('\0') {
            return Err(format!("{} of the new binary is too long or not text", unit.name));
        }
        // Their links are made by that name, where the system does not run.
        if let Some(target) = wanted_by(unit).find(|target| !target.bytes().all(of_a_name)) {
            let shown: String = target.chars().take(80).collect();
            return Err(format!("{} of the new binary is to be wanted by {shown:?}", unit.name));
        }
        if !names.insert(&unit.name) {
            return Err(format!("the new binary brings {} twice", unit.name));
        }
    }
    Ok(units)
}

/// Whether a unit's name can have this byte.
fn of_a_name(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"-_.@:\\".contains(&b)
}

/// The units that a first installation hooks this one into.
fn wanted_by(unit: &Unit) -> impl Iterator<Item = &str> {
    unit.content.lines().filter_map(|line| line.strip_prefix("WantedBy=")).flat_map(str::split_whitespace)
}

/// What systemd says of the units of a release.
#[derive(Debug)]
pub(crate) enum Judged {
    /// Nothing against them; perhaps something about an operator's drop-in of theirs.
    Good(Vec<String>),
    /// These lines name one of them.
    Bad(Vec<String>),
}

/// Has systemd look at all units together, with the staged binary in the place of the installed one.
///
/// # Errors
/// When they can't be staged, or systemd can't be asked.
pub(crate) fn verify(systemd: Systemd, dir: &Path, binary: &Path, units: &[Unit]) -> Result<Judged, String> {
    let staging = |e: std::io::Error| format!("staging the units in {dir:?}: {e}");
    make_dir(dir, 0o755).map_err(staging)?;
    let staged = binary.to_string_lossy();
    let mut files: Vec<PathBuf> = Vec::new();
    for unit in units {
        let path = dir.join(&unit.name);
        std::fs::write(&path, unit.content.replace(EXECUTABLE, &staged)).map_err(staging)?;
        files.push(path);
    }
    let arguments: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let lines = systemd.verify(&arguments).map_err(|e| format!("verifying the new units: {e}"))?;
    let named = |line: &String| units.iter().any(|unit| line.contains(&unit.name));
    let drop_in = |line: &String| units.iter().any(|unit| line.contains(&format!("/{}.d/", unit.name)));
    let (warnings, problems): (Vec<_>, Vec<_>) = lines.into_iter().filter(named).partition(drop_in);
    Ok(if problems.is_empty() { Judged::Good(warnings) } else { Judged::Bad(problems) })
}

/// The users and groups that units name and that do not exist: `user ployz`, `group ployz-admission`.
pub(crate) fn missing_accounts(host: &Host, units: &[Unit]) -> Vec<String> {
    let mut missing = BTreeSet::new();
    for (key, value) in
        units.iter().flat_map(|unit| unit.content.lines()).filter_map(|line| line.split_once('='))
    {
        for name in value.split_whitespace() {
            match key {
                "User" if host.account(name).is_none() => missing.insert(format!("user {name}")),
                "Group" | "SupplementaryGroups" | "SocketGroup" if host.group(name).is_none() => {
                    missing.insert(format!("group {name}"))
                }
                "SocketUser" if host.account(name).is_none() => missing.insert(format!("user {name}")),
                _ => false,
            };
        }
    }
    missing.into_iter().collect()
}

/// Units that are on disk already, for a release that is too old to describe its own: they stay as they are.
pub(crate) fn on_disk(host: &Host, names: &[String]) -> Vec<Unit> {
    let read = |name: &String| {
        let content = String::from_utf8(read_bounded(&host.unit(name), MOST_UNIT).ok()?).ok()?;
        Some(Unit { name: name.clone(), content, enable: false, start: true })
    };
    names.iter().filter_map(read).collect()
}

/// Disables, stops and removes units that are ours and that the release no longer has.
pub(crate) fn remove(
    host: &Host,
    systemd: Systemd,
    names: &[&str],
    _admission: &Admission,
) -> Result<(), Box<dyn std::error::Error>> {
    // A template has no state of its own; its instances end by themselves, and PID 1 is not told: a reload would apply
    // what is in effect without it to the worker that may be doing this.
    let (templates, loadable): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| name.contains('@'));
    let delete = |name: &&str| match std::fs::remove_file(host.unit(name)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => sync_parent(&host.unit(name)),
    };
    if !loadable.is_empty() {
        systemd.disable_now(&loadable)?;
        loadable.iter().try_for_each(delete)?;
        systemd.daemon_reload()?;
    }
    Ok(templates.iter().try_for_each(delete)?)
}

/// The units whose file on disk is not this.
pub(crate) fn differing<'a>(host: &Host, units: &'a [Unit]) -> Vec<&'a Unit> {
    let same = |unit: &&Unit| {
        read_bounded(&host.unit(&unit.name), MOST_UNIT)
            .is_ok_and(|on_disk| on_disk == unit.content.as_bytes())
    };
    units.iter().filter(|unit| !same(unit)).collect()
}

/// Writes one unit file whole.
pub(crate) fn write(host: &Host, unit: &Unit, _admission: &Admission) -> std::io::Result<()> {
    make_dir(&host.units(), 0o755)?;
    write_whole(host, &host.unit(&unit.name), unit.content.as_bytes(), 0o644, Account { uid: 0, gid: 0 })
}

/// Enables units without a running systemd: the links that `systemctl enable` would make.
pub(crate) fn enable_offline(host: &Host, units: &[&Unit], _admission: &Admission) -> std::io::Result<()> {
    for (unit, link) in links(host, units) {
        make_dir(link.parent().unwrap_or(&link), 0o755)?;
        let file = Path::new("/usr/local/lib/systemd/system").join(&unit.name);
        match std::os::unix::fs::symlink(file, &link) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
            _ => sync_parent(&link)?,
        }
    }
    Ok(())
}

/// Makes the links that `systemctl enable` made durable.
pub(crate) fn sync_links(host: &Host, units: &[&Unit]) -> std::io::Result<()> {
    for (_, link) in links(host, units) {
        match sync_parent(&link) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    sync_parent(&host.admin_units().join("any"))
}

/// The links that enabling makes: `sockets.target.wants/ployz.socket`.
pub(super) fn links<'a>(host: &Host, units: &[&'a Unit]) -> Vec<(&'a Unit, PathBuf)> {
    let of = |unit: &&'a Unit| {
        let unit = *unit;
        let link = |target| (unit, host.admin_units().join(format!("{target}.wants")).join(&unit.name));
        wanted_by(unit).map(link).collect::<Vec<_>>()
    };
    units.iter().flat_map(of).collect()
}

/// The names of the units that systemd can be asked about: a template is not one, only its instances are.
pub(crate) fn loadable(units: &[Unit]) -> Vec<&str> {
    units.iter().map(|unit| unit.name.as_str()).filter(|name| !name.contains('@')).collect()
}

/// The names of the units that are sockets, and of those that are services, without templates.
pub(crate) fn kept_running(units: &[Unit]) -> (Vec<&str>, Vec<&str>) {
    let names =
        units.iter().filter(|unit| unit.start && !unit.name.contains('@')).map(|unit| unit.name.as_str());
    names.partition(|name| Path::new(name).extension().is_some_and(|e| e == "socket"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_a_binary_says_of_its_units_is_checked() {
        let unit = |name: &str| serde_json::json!({"name": name, "content": "[Unit]\n", "enable": true, "start": true});
        let said = |units: serde_json::Value| read(units.to_string().as_bytes());
        assert_eq!(read(&serde_json::to_vec(&shipped()).unwrap()).unwrap(), shipped());
        for bad in [
            "ssh.service",
            "../ployz.service",
            "ployz.timer",
            "ployz/x.service",
            "ployz.service.d",
            "Ployz.service",
        ] {
            assert!(said(serde_json::json!([unit(bad)])).is_err(), "{bad}");
        }
        let mut elsewhere = unit("ployz.service");
        elsewhere["content"] = "[Install]\nWantedBy=multi-user.target ../../../tmp/x\n".into();
        assert!(said(serde_json::json!([elsewhere])).is_err(), "a link outside of its directory");
        assert!(said(serde_json::json!([])).is_err());
        assert!(said(serde_json::json!([unit("ployz.service"), unit("ployz.service")])).is_err());
        assert!(said(serde_json::json!([{"name": "ployz.service"}])).is_err());
    }
}
