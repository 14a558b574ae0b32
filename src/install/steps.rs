//! What each stage does, but for acquire and verify (`acquisition`): prepare, preflight, activate, restart, confirm.

use std::io;
use std::path::Path;

use super::acquisition::Verified;
use super::activation::{self, Activated, Staged, Switched};
use super::archive::ArchiveError;
use super::attempt::{Installation, Outcome};
use super::events::{Event, SCHEMA, What};
use super::flow::{Failure, Flow, none_of};
use super::installed::on_disk;
use super::preflight;
use super::readiness::{self, Expected};
use super::staging::Staging;
use super::{Mode, Release, host as prepare, restart, units};
use crate::durable::copy_exactly;
use crate::systemd::Systemd;

impl Flow<'_> {
    pub(super) fn prepare(&mut self) -> Result<(), Failure> {
        let (host, deadline) = (self.host, self.settings.deadlines.packages);
        let failed = |error: String| Failure::new("prepare", error);
        match self.request.mode {
            Mode::SoftwareOnly => {
                none_of("prerequisites", prepare::missing_prerequisites(host, self.docker))?;
                prepare::share_records(host, &self.admission).map_err(failed)?;
            }
            Mode::InstallationOnly => match prepare::accounts(host, deadline, &self.admission) {
                Ok(prepared) => self.prepared(prepared),
                Err(e) => self.warn(format!(
                    "accounts are declared and not made ({e}): run systemd-sysusers in the image"
                )),
            },
            Mode::Upgrade => {}
            Mode::Prepare | Mode::Recover => {
                let prepared = prepare::accounts(host, deadline, &self.admission).map_err(failed)?;
                self.prepared(prepared);
                prepare::directories(host, &self.admission).map_err(failed)?;
            }
        }
        if self.request.mode == Mode::Recover {
            return Ok(());
        }
        if self.request.mode != Mode::InstallationOnly {
            let asked = prepare::docker::Asked {
                host,
                settings: self.settings,
                systemd: self.systemd,
                choice: self.docker,
                installs: self.request.mode == Mode::Prepare,
                interrupt: self.interrupt,
            };
            let (record, tell, deaf) = (&self.record, &mut self.tell, &mut self.deaf);
            let mut told = |fact: &str| {
                tracing::info!(ployz_attempt = record.id, ployz_stage = "preparing", "{fact}");
                let what = What::Stage { attempt: &record.id, stage: &record.stage, fact: Some(fact) };
                *deaf |= tell(&Event { schema: SCHEMA, what, at: jiff::Timestamp::now() }).is_err();
            };
            let prepared = prepare::docker::prepare(&asked, &mut told, &self.admission);
            let asked = prepare::zfs::Asked {
                host,
                settings: self.settings,
                systemd: self.systemd,
                storage: self.request.storage.as_ref(),
                interrupt: self.interrupt,
            };
            let storage = match &prepared {
                Ok(_) => prepare::zfs::prepare(&asked, &mut told, &self.admission),
                Err(_) => Ok(prepare::Prepared::default()),
            };
            self.prepared(prepared.map_err(|e| Failure::new("docker", e))?);
            self.prepared(storage.map_err(|e| Failure::new("storage", e))?);
        } else {
            prepare::share_records(host, &self.admission).map_err(failed)?;
        }
        let prepared =
            prepare::operators(host, &self.request.operators, deadline, &self.admission).map_err(failed)?;
        self.prepared(prepared);
        Ok(())
    }

    fn prepared(&mut self, prepared: prepare::Prepared) {
        for done in prepared.done {
            self.fact(&done);
        }
        for warning in prepared.warnings {
            self.warn(warning);
        }
    }

    pub(super) fn preflight(
        &mut self,
        release: &Release,
        verified: Verified,
        staging: &Staging,
    ) -> Result<Staged, Failure> {
        let next = staging.next();
        let (sha256, archive_sha256) = match verified {
            Verified::Archive(archive) => {
                let sha256 = archive.extract(next).map_err(|e| match e {
                    ArchiveError::Io { .. } => Failure::new("disk", e),
                    e => Failure::new("archive", e),
                })?;
                (sha256, Some(archive.sha256))
            }
            Verified::InPlace { archive_sha256 } => {
                (self.before.keepable().unwrap_or_default().to_owned(), Some(archive_sha256))
            }
            Verified::Executable(path) => {
                let sha256 = copy_exactly(&path, next)
                    .map_err(|e| Failure::new("disk", format!("copying {path:?} to {next:?}: {e}")))?;
                let described = self.before.inventory.describes(&sha256);
                let archive_sha256 = described.and_then(|described| described.archive_sha256.clone());
                (sha256, archive_sha256)
            }
        };
        let in_place = self.before.keepable() == Some(sha256.as_str());
        let binary = if in_place { self.host.installed() } else { next.to_owned() };
        executable(&binary, in_place)?;
        let deadline = self.settings.deadlines.preflight;
        let about = preflight::ask_version(self.host, &binary, deadline, self.interrupt)
            .map_err(|refused| Failure::new(refused.reason, refused.error))?;
        if about.version != release.version.to_string() {
            let error = format!("the new binary says that it is {}, not {}", about.version, release.version);
            return Err(Failure::new("wrong_version", error));
        }
        none_of("requirements", preflight::requirements(&about, self.systemd))?;
        let units = match units::ask(self.host, &binary, deadline, self.interrupt) {
            Ok(Some(units)) => units,
            Ok(None) => {
                self.warn("the release is too old to describe its units: those that are there stay".into());
                units::on_disk(self.host, &self.before.inventory.units)
            }
            Err(e) => return Err(Failure::new("units", e)),
        };
        if let Some(systemd) = self.systemd.filter(|_| !units::differing(self.host, &units).is_empty()) {
            let judged = units::verify(systemd, &staging.path("units"), &binary, &units);
            match judged.map_err(|e| Failure::new("staging", e))? {
                units::Judged::Bad(causes) => {
                    let failure = Failure::new("units", "systemd finds fault with the new units");
                    return Err(failure.causes(causes));
                }
                units::Judged::Good(warnings) => {
                    for warning in warnings {
                        self.warn(format!("systemd finds fault with a drop-in: {warning}"));
                    }
                }
            }
        }
        if let Some(systemd) = self.systemd {
            none_of("host", preflight::unit_problems(self.host, systemd, &units))?;
        }
        if self.request.mode != Mode::InstallationOnly {
            none_of("accounts", prepare::missing_for_units(self.host, &units, release.version))?;
        }
        self.fact(&format!("runs here, reports {}", about.version));
        self.record.target_digest = Some(sha256.clone());
        let file = (!in_place).then_some(binary);
        Ok(Staged { version: release.version, sha256, archive_sha256, file, units, docker: self.docker })
    }

    pub(super) fn activate(&mut self, staged: Staged) -> Result<Activated, Failure> {
        let (host, systemd) = (self.host, self.systemd);
        let (admission, record) = (&self.admission, &mut self.record);
        let mut switched = |path: &Path, how: Switched| match how {
            Switched::Renamed => {
                record.installation = Installation::Replaced;
                record.switched.push(path.display().to_string());
            }
            // What is switched must be finished, whether or not the record can say so now.
            Switched::Durable => {
                if let Err(e) = record.write(host, admission) {
                    record.warnings.push(format!("the record could not be written: {e}"));
                }
            }
        };
        let interrupt = self.interrupt;
        let ending = || interrupt.terminated();
        let activated =
            activation::activate(host, admission, systemd, staged, &self.before, &ending, &mut switched)
                .map_err(|e| Failure::new("activate", e))?;
        let fact = if activated.replaced {
            format!("{}, {} units", host.installed().display(), activated.units_written)
        } else {
            "nothing to replace".to_owned()
        };
        self.fact(&fact);
        Ok(activated)
    }

    pub(super) fn restart(
        &mut self,
        systemd: Systemd,
        activated: &Activated,
    ) -> Result<restart::Restarted, Failure> {
        let mounted = readiness::volumes::mounted(self.host);
        let mut restarted = restart::restart(systemd, activated, &self.admission).map_err(|e| {
            Failure::new("restart", e).help("look at: systemctl status ployz.socket ployz.service")
        })?;
        restarted.mounted = mounted;
        if restarted.refused {
            self.record.warnings.push(format!(
                "{} was closed and opened again: for a moment connections were refused",
                restarted.sockets.join(", ")
            ));
        }
        let names: Vec<&str> =
            restarted.sockets.iter().chain(&restarted.services).map(String::as_str).collect();
        self.fact(&if names.is_empty() { "nothing to restart".to_owned() } else { names.join(", ") });
        Ok(restarted)
    }

    pub(super) fn confirm(
        &mut self,
        systemd: Systemd,
        activated: &Activated,
        restarted: &restart::Restarted,
    ) -> Result<Outcome, Failure> {
        let nothing_was_needed =
            !activated.replaced && activated.template.is_none() && restarted.services.is_empty();
        let expected = Expected {
            version: activated.version,
            executable: activated.executable,
            replaced: self
                .before
                .current
                .as_ref()
                .map(|(inode, _)| *inode)
                .filter(|i| *i != activated.executable),
            restarts_before: restarted.restarts_before,
            replaced_pid: restarted.replaced_pid,
            services: restarted.others.clone(),
            mounted: restarted.mounted.clone(),
        };
        // What was confirmed before and runs on has shown its stability for as long as it runs.
        let described = self.before.inventory.describes(&activated.sha256);
        let shown = match described {
            Some(described) if nothing_was_needed && described.confirmed => restarted.age,
            _ => std::time::Duration::ZERO,
        };
        let window = self.settings.deadlines.window.saturating_sub(shown);
        let started = std::time::Instant::now();
        let mut ready = None;
        let mut warnings = Vec::new();
        let confirmed = {
            let (host, admission, record) = (self.host, &self.admission, &mut self.record);
            readiness::confirm(
                host,
                systemd,
                &expected,
                self.settings.deadlines.confirm,
                window,
                self.interrupt,
                &mut |pid, at| {
                    record.ready_observed_at = Some(at);
                    ready = Some((pid, started.elapsed()));
                    if let Err(e) = record.write(host, admission) {
                        record.warnings.push(format!("the record could not be written: {e}"));
                    }
                },
                &mut |warning| warnings.push(warning),
            )
        };
        for warning in warnings {
            self.warn(warning);
        }
        if let Some((pid, after)) = ready {
            let fact =
                format!("{} is running (pid {pid}), ready after {} ms", activated.version, after.as_millis());
            self.fact(&fact);
        }
        let confirmed = confirmed.map_err(|not| {
            let others = restarted.others.iter().map(|(name, _)| format!(" -u {name}")).collect::<String>();
            let logs = format!("journalctl -u {}{others} -n 20", units::SERVICE);
            Failure::new(not.reason, not.observed).help(format!("its last words: {logs}"))
        })?;
        self.still_in_place(activated)?;
        let ours = &self.before.inventory.units;
        let dropped: Vec<&str> =
            ours.iter().map(String::as_str).filter(|name| !activated.has_unit(name)).collect();
        let removed = match dropped.as_slice() {
            [] => Ok(()),
            names => units::remove(self.host, systemd, names, &self.admission),
        };
        let gone = if removed.is_ok() { dropped.as_slice() } else { &[] };
        let marked = activation::mark_confirmed(self.host, &self.admission, gone);
        self.switch_template(activated);
        if let Err(e) = removed {
            self.warn(format!("units that the release no longer has were not removed: {e}"));
        }
        if let Err(e) = marked {
            self.warn(format!("installed.json could not be written: {e}"));
        }
        if !window.is_zero() {
            self.fact(&format!("still the same after {:.0} s", window.as_secs_f32()));
        }
        Ok(Outcome::Succeeded {
            version: activated.version,
            pid: confirmed.pid,
            sha256: activated.sha256.clone(),
            nothing_was_needed,
        })
    }

    /// What was confirmed is what is in place: others write to this host too.
    fn still_in_place(&mut self, activated: &Activated) -> Result<(), Failure> {
        let path = self.host.installed();
        let found =
            on_disk(&path).map_err(|e| Failure::new("displaced", format!("reading {path:?}: {e}")))?;
        if found.as_ref().is_none_or(|(_, sha256)| *sha256 != activated.sha256) {
            let is =
                found.map_or_else(|| "gone".into(), |(_, sha256)| format!("another one ({}…)", &sha256[..8]));
            let error = format!(
                "{} runs, and {} is {is}: somebody changed it while it was confirmed",
                activated.version,
                path.display()
            );
            return Err(
                Failure::new("displaced", error).help("find out who: what manages this host's files?")
            );
        }
        let template = activated.template.as_ref().map(|unit| unit.name.as_str());
        let changed: Vec<String> = units::differing(self.host, &activated.units)
            .into_iter()
            .filter(|unit| Some(unit.name.as_str()) != template)
            .map(|unit| self.host.unit(&unit.name).display().to_string())
            .collect();
        if !changed.is_empty() {
            self.warn(format!(
                "{} is not what this release brings any more: somebody changed it since it was written",
                changed.join(", ")
            ));
        }
        Ok(())
    }

    /// The last file: the template of the worker that may be doing this.
    fn switch_template(&mut self, activated: &Activated) {
        let Some(template) = &activated.template else { return };
        match activation::switch_template(self.host, template, &self.admission) {
            Ok(()) => {
                self.record.installation = Installation::Replaced;
                self.record.switched.push(self.host.unit(&template.name).display().to_string());
            }
            Err(e) => self.warn(format!("{} could not be switched: {e}", template.name)),
        }
    }
}

/// Makes a staged file executable by everyone; the installed one must be that already.
fn executable(path: &Path, in_place: bool) -> Result<(), Failure> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |e: io::Error| Failure::new("disk", format!("setting the mode of {path:?}: {e}"));
    let mode = std::fs::metadata(path).map_err(failed)?.permissions().mode() & 0o7777;
    if in_place && mode == 0o755 {
        return Ok(());
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).map_err(failed)
}
