//! Activation: the renames that make a release current, in an order in which a crash at any point leaves a whole
//! executable in place, and the record saying what was switched.

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;

use super::admission::Admission;
use super::installed::{Docker, Inode, Installed, Inventory, on_disk};
use super::release::Version;
use super::units::{self, Unit, WORKER};
use crate::command::Run;
use crate::durable::sync_parent;
use crate::host::Host;
use crate::systemd::Systemd;

/// An executable beside the current one, extracted and preflighted.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) version: Version,
    pub(crate) sha256: String,
    pub(crate) archive_sha256: Option<String>,
    /// Where it is; `None` when the same bytes are in place already.
    pub(crate) file: Option<std::path::PathBuf>,
    /// The units that it brings.
    pub(crate) units: Vec<Unit>,
    /// The operator's choice about Docker, which is recorded with it.
    pub(crate) docker: Docker,
}

/// What was in place at admission.
#[derive(Debug)]
pub(crate) struct Before {
    /// The executable in place and its digest.
    pub(crate) current: Option<(Inode, String)>,
    /// Who besides root could change that file.
    pub(crate) changeable: Option<String>,
    /// What the last installer wrote.
    pub(crate) inventory: Inventory,
    /// Whether the executable in place was running and ready.
    pub(crate) was_ready: bool,
    /// What is running, if anything answered.
    pub(crate) running: Option<String>,
}

impl Before {
    /// Whether the current executable may become the previous one: it was confirmed; or nobody described it, and it
    /// was running and ready, or there is nothing better.
    fn keeps_current(&self, host: &Host) -> bool {
        let Some((_, sha256)) = self.current.as_ref().filter(|_| self.changeable.is_none()) else {
            return false;
        };
        match self.inventory.describes(sha256) {
            // Put in place without being watched (an image): it may be kept where it runs and nothing better is there.
            Some(described) => described.confirmed || (self.was_ready && !host.previous().exists()),
            None => self.was_ready || !host.previous().exists(),
        }
    }

    /// The digest of the executable in place, if it may stay there.
    pub(crate) fn keepable(&self) -> Option<&str> {
        self.current.as_ref().filter(|_| self.changeable.is_none()).map(|(_, sha256)| sha256.as_str())
    }

    /// The version in place, if it is described.
    pub(crate) fn version(&self) -> Option<Version> {
        let (_, sha256) = self.current.as_ref()?;
        self.inventory.describes(sha256).map(|described| described.version)
    }
}

/// A release that is current.
#[derive(Debug)]
pub(crate) struct Activated {
    pub(crate) version: Version,
    pub(crate) sha256: String,
    /// The executable in place.
    pub(crate) executable: Inode,
    /// Units whose file was written, or whose process is not known to run under it.
    pub(crate) changed_units: Vec<String>,
    pub(crate) units: Vec<Unit>,
    /// The worker's template, where it has to be switched: after confirmation, and without a reload, which would apply
    /// it to the worker that does this.
    pub(crate) template: Option<Unit>,
    /// How many unit files were written.
    pub(crate) units_written: usize,
    /// Whether any file was switched.
    pub(crate) replaced: bool,
}

impl Activated {
    /// Whether the release brings a unit of this name.
    pub(crate) fn has_unit(&self, name: &str) -> bool {
        self.units.iter().any(|unit| unit.name == name)
    }
}

/// How far the switch of one file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Switched {
    /// The name leads to the new content; a power loss may still take that back.
    Renamed,
    /// It stays so.
    Durable,
}

/// An activation that stopped on the way.
#[derive(Debug, thiserror::Error)]
#[error("{doing}: {source}")]
pub(crate) struct ActivationError {
    doing: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

fn stopped<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    doing: impl Into<String>,
) -> impl FnOnce(E) -> ActivationError {
    let doing = doing.into();
    move |e| ActivationError { doing, source: e.into() }
}

/// Makes a staged release current. `switched` is told of every file twice: as soon as its name leads to the new content,
/// and when that is durable. When this process is `ending`, files are switched to the last one and systemd, which may go
/// down itself, is asked nothing more.
pub(crate) fn activate(
    host: &Host,
    admission: &Admission,
    systemd: Option<Systemd>,
    staged: Staged,
    before: &Before,
    ending: &dyn Fn() -> bool,
    switched: &mut dyn FnMut(&Path, Switched),
) -> Result<Activated, ActivationError> {
    let installed = host.installed();
    let mut inventory = before.inventory.clone();
    let mut replaced = false;
    if let Some(next) = &staged.file {
        settle(next).map_err(stopped(format!("making {next:?} durable")))?;
        if before.keeps_current(host) {
            keep_previous(host, admission).map_err(stopped("keeping the previous binary"))?;
        }
        std::fs::rename(next, &installed).map_err(stopped(format!("renaming {next:?} to {installed:?}")))?;
        switched(&installed, Switched::Renamed);
        sync_parent(&installed).map_err(stopped("making the rename durable"))?;
        switched(&installed, Switched::Durable);
        replaced = true;
    }
    // Which units will have to be restarted is written before the first of them is switched: an installer that is cut
    // off leaves it to the next one.
    let (template, differing): (Vec<&Unit>, Vec<&Unit>) = units::differing(host, &staged.units)
        .into_iter()
        .partition(|unit| unit.name == WORKER && host.unit(WORKER).exists() && systemd.is_some());
    let template = template.first().map(|unit| (*unit).clone());
    let loaded = systemd.map(|systemd| stale_in_systemd(systemd, &staged.units)).unwrap_or_default();
    let mut pending = inventory.pending.clone();
    pending.retain(|name| staged.units.iter().any(|unit| unit.name == *name));
    let loadable = differing.iter().map(|unit| &unit.name).filter(|name| !name.contains('@'));
    for name in loadable.chain(&loaded) {
        if !pending.contains(name) {
            pending.push(name.clone());
        }
    }
    if systemd.is_none() {
        // Nothing runs here.
        pending.clear();
    }
    if pending != inventory.pending {
        inventory.pending.clone_from(&pending);
        inventory.write(host, admission).map_err(stopped("writing installed.json"))?;
    }
    for unit in &differing {
        let path = host.unit(&unit.name);
        let written = units::write(host, unit, admission);
        // A write that failed may have failed after the rename.
        if written.is_ok() || units::differing(host, std::slice::from_ref(*unit)).is_empty() {
            switched(&path, Switched::Renamed);
        }
        written.map_err(stopped(format!("writing {}", unit.name)))?;
        switched(&path, Switched::Durable);
        replaced = true;
    }
    if replaced {
        relabel(host, &pending);
    }
    // Before the inventory names them: a crash in between leaves them new to the next installer, which enables again.
    let fresh: Vec<&Unit> =
        staged.units.iter().filter(|unit| unit.enable && !inventory.units.contains(&unit.name)).collect();
    match systemd {
        Some(systemd) => {
            if !pending.is_empty() && !ending() {
                systemd.daemon_reload().map_err(stopped("reloading unit files"))?;
            }
            if !fresh.is_empty() && !ending() {
                let names: Vec<&str> = fresh.iter().map(|unit| unit.name.as_str()).collect();
                systemd.enable(&names).map_err(stopped("enabling units"))?;
                units::sync_links(host, &fresh).map_err(stopped("making enabled units durable"))?;
            }
        }
        None => units::enable_offline(host, &fresh, admission).map_err(stopped("enabling units"))?,
    }
    let same =
        inventory.current.as_ref().is_some_and(|c| c.sha256 == staged.sha256 && c.version == staged.version);
    if !same || replaced {
        inventory.current = Some(Installed {
            version: staged.version,
            sha256: staged.sha256.clone(),
            archive_sha256: staged.archive_sha256.clone(),
            installed_at: Timestamp::now(),
            attempt: admission.attempt().to_owned(),
            confirmed: false,
            confirmed_at: None,
        });
    }
    // The retained file decides what is said of it: an installer that was cut off may have left another one.
    let retained = on_disk(&host.previous()).ok().flatten();
    let known = &before.inventory;
    inventory.previous = retained.and_then(|(_, sha256)| known.describes(&sha256).cloned());
    // Units that the release no longer has stay ours until they are removed, after confirmation.
    // What could not be enabled stays new.
    let unfinished = systemd.is_some() && ending();
    for unit in staged.units.iter().filter(|unit| !unfinished || !fresh.contains(unit)) {
        if !inventory.units.contains(&unit.name) {
            inventory.units.push(unit.name.clone());
        }
    }
    inventory.docker = staged.docker;
    if inventory != before.inventory {
        inventory.write(host, admission).map_err(stopped("writing installed.json"))?;
    }
    // Observed, not assumed: what is in place is what was meant to be.
    let (executable, sha256) = on_disk(&installed)
        .map_err(stopped(format!("reading {installed:?}")))?
        .ok_or_else(|| io::Error::other("it is not there"))
        .map_err(stopped(format!("reading {installed:?}")))?;
    if sha256 != staged.sha256 {
        return Err(stopped("looking at what is in place")(io::Error::other(format!(
            "{installed:?} has sha256 {sha256}, not {}",
            staged.sha256
        ))));
    }
    Ok(Activated {
        version: staged.version,
        sha256,
        executable,
        changed_units: pending,
        units_written: differing.len(),
        template,
        units: staged.units,
        replaced,
    })
}

/// Mode, then content, durable before any name leads to it.
fn settle(next: &Path) -> io::Result<()> {
    let file = std::fs::File::open(next)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o755))?;
    file.sync_all()
}

/// Keeps the current executable as the previous one, as a second name of the same file. Where it is that already,
/// nothing is done: renaming two links of one file over each other is a silent no-op.
fn keep_previous(host: &Host, admission: &Admission) -> io::Result<()> {
    let (current, previous) = (host.installed(), host.previous());
    let meta = match std::fs::metadata(&current) {
        Ok(meta) => meta,
        // Removed since it was looked at: what is put in its place is all the more wanted.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    if std::fs::symlink_metadata(&previous).is_ok_and(|p| p.ino() == meta.ino() && p.dev() == meta.dev()) {
        return Ok(());
    }
    let temporary = host.bin().join(format!(".ployzd.previous.{}", admission.attempt()));
    let _ = std::fs::remove_file(&temporary);
    if std::fs::hard_link(&current, &temporary).is_err() {
        // A filesystem without links, or an immutable file.
        let copied = std::fs::copy(&current, &temporary).and_then(|_| settle(&temporary));
        if copied.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        copied?;
    }
    let renamed = std::fs::rename(&temporary, &previous);
    if renamed.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    renamed
}

/// Units that PID 1 has loaded from another file than the one on disk.
fn stale_in_systemd(systemd: Systemd, units: &[Unit]) -> Vec<String> {
    let names = units::loadable(units);
    let shown = systemd.show(&names).unwrap_or_default();
    names
        .iter()
        .zip(shown)
        .filter(|(_, unit)| unit.needs_reload)
        .map(|(name, _)| (*name).to_owned())
        .collect()
}

/// Files made in their own directory have the right label already, except where a policy names the single file.
fn relabel(host: &Host, changed_units: &[String]) {
    let Some(tool) =
        ["/usr/sbin/restorecon", "/sbin/restorecon"].map(Path::new).into_iter().find(|p| p.exists())
    else {
        return;
    };
    if host.privileged() {
        let files = changed_units.iter().map(|name| host.unit(name)).chain([host.installed()]);
        if let Err(e) = Run::new(tool, Duration::from_secs(30)).args(files).check() {
            tracing::warn!("restoring SELinux labels: {e}");
        }
    }
}

/// Switches the worker's template. PID 1 is not told: the next worker is started from it all the same.
pub(crate) fn switch_template(host: &Host, template: &Unit, admission: &Admission) -> io::Result<()> {
    units::write(host, template, admission)?;
    relabel(host, std::slice::from_ref(&template.name));
    Ok(())
}

/// Writes that the current release is confirmed, and which units are ours no longer.
pub(crate) fn mark_confirmed(host: &Host, admission: &Admission, gone: &[&str]) -> io::Result<()> {
    let (mut inventory, _) = Inventory::read(host);
    let before = inventory.clone();
    if let Some(current) = inventory.current.as_mut().filter(|current| !current.confirmed) {
        current.confirmed = true;
        current.confirmed_at = Some(Timestamp::now());
    }
    inventory.pending.clear();
    inventory.units.retain(|name| !gone.contains(&name.as_str()));
    if inventory == before { Ok(()) } else { inventory.write(host, admission) }
}
