//! The accepted part of an installation: every stage in its order, with its record written as it begins.

use std::io;
use std::path::Path;

use jiff::Timestamp;

use super::acquisition::Verified;
use super::activation::{self, Activated, Before, Staged, Switched};
use super::admission::Admission;
use super::archive::{ArchiveError, MOST_ARCHIVE};
use super::attempt::{Installation, Outcome, Record, Stage};
use super::events::{Event, Refusal, SCHEMA, Tell, What};
use super::installed::{Docker, Inventory, on_disk};
use super::preflight::{self, Problem};
use super::readiness::{self, Expected};
use super::source::Settings;
use super::staging::Staging;
use super::{Mode, Release, Request, Source, host as prepare, records, restart, units};
use crate::durable::{copy_exactly, writable_by_others};
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::systemd::Systemd;

/// An accepted attempt on its way.
pub(super) struct Flow<'a> {
    pub(super) host: &'a Host,
    pub(super) settings: &'a Settings,
    request: &'a Request,
    systemd: Option<Systemd>,
    docker: Docker,
    admission: Admission,
    pub(super) before: Before,
    pub(super) record: Record,
    pub(super) interrupt: &'a Interrupt,
    pub(super) tell: Tell<'a>,
    /// Nobody reads what is told any more: before activation that cancels, afterwards it is noted.
    pub(super) deaf: bool,
    /// Activation has begun: from here on it is finished.
    committed: bool,
}

/// Why a stage failed.
pub(super) struct Failure {
    reason: &'static str,
    error: String,
    causes: Vec<String>,
    help: Vec<String>,
}

impl Failure {
    #[allow(clippy::needless_pass_by_value, reason = "errors come as they are")]
    pub(super) fn new(reason: &'static str, error: impl ToString) -> Self {
        Self { reason, error: error.to_string(), causes: Vec::new(), help: Vec::new() }
    }

    pub(super) fn cancelled(signal: &str) -> Self {
        Self::new("cancelled", format!("cancelled by {signal}"))
    }

    pub(super) fn error(self) -> String {
        self.error
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.help.push(help.into());
        self
    }

    fn problems(reason: &'static str, problems: Vec<Problem>) -> Self {
        let mut texts = problems.iter().map(|problem| problem.what.clone());
        let error = texts.next().unwrap_or_default();
        let causes = texts.collect();
        Self { reason, error, causes, help: problems.into_iter().map(|problem| problem.help).collect() }
    }
}

/// Fails with all problems at once, if there are any.
fn none_of(reason: &'static str, problems: Vec<Problem>) -> Result<(), Failure> {
    if problems.is_empty() { Ok(()) } else { Err(Failure::problems(reason, problems)) }
}

impl<'a> Flow<'a> {
    /// Closes what earlier attempts left open and makes this one's record durable: from here on it has happened.
    pub(super) fn accept(
        host: &'a Host,
        settings: &'a Settings,
        request: &'a Request,
        release: &Release,
        admission: Admission,
        interrupt: &'a Interrupt,
        tell: Tell<'a>,
    ) -> Result<Self, Refusal> {
        let systemd =
            (request.mode != Mode::InstallationOnly).then(|| Systemd::new(settings.deadlines.systemctl));
        let (mut inventory, damage) = Inventory::read(host);
        let mut record = Record::new(
            host,
            admission.attempt(),
            admission.kind(),
            release.requested,
            Some(release.version),
        );
        if let Some(damage) = damage {
            record.warnings.push(inventory.start_again(host, &damage));
        }
        let current = on_disk(&host.installed()).unwrap_or_else(|e| {
            record.warnings.push(format!("reading {:?}: {e}", host.installed()));
            None
        });
        record.from_digest = current.as_ref().map(|(_, sha256)| sha256.clone());
        record.warnings.extend(records::close_open(host, &admission, record.from_digest.as_deref()));
        let answer = systemd.and_then(|systemd| readiness::look(host, systemd).ok());
        let was_ready = answer.as_ref().is_some_and(|seen| {
            seen.executable.is_some()
                && seen.executable == current.as_ref().map(|(inode, _)| *inode)
                && seen.answer.as_ref().is_ok_and(|answer| answer.ready && answer.pid == seen.unit.main_pid)
        });
        let problems =
            answer.as_ref().and_then(|seen| seen.answer.as_ref().ok()).map(|answer| &answer.problems);
        for problem in problems.into_iter().flatten() {
            record.warnings.push(format!("the daemon was not ready before: {problem}"));
        }
        let running = answer.and_then(|seen| seen.answer.ok()).map(|answer| answer.version);
        let docker = request.docker.unwrap_or(inventory.docker);
        let installed = host.installed();
        let changeable = if host.privileged() { writable_by_others(&installed) } else { None };
        if let Some(who) = &changeable {
            record.warnings.push(format!("{who}: it is replaced, whatever is in it"));
        }
        let before = Before { current, changeable, inventory, was_ready, running };
        record.from = before.version();
        if let (Some((_, sha256)), None) = (&before.current, record.from) {
            record.warnings.push(format!(
                "the installed binary ({}…) is not what installed.json describes",
                &sha256[..8]
            ));
        }
        let running = before.running.as_ref().and_then(|version| version.parse().ok());
        if let Some(newer) = running.or(record.from).filter(|version| release.version < *version) {
            record.warnings.push(format!(
                "{} is older than {newer}: older software may not understand what newer software has written",
                release.version
            ));
        }
        record.write(host, &admission).map_err(|e| {
            let what = format!("the attempt's record can't be written: {e}");
            Refusal::one(what, "look at the filesystem: df -h /var/lib/ployz-install")
        })?;
        tracing::info!(
            ployz_attempt = record.id,
            ployz_stage = "accepted",
            message_id = "f2c1e7a4b0d94c1c8a5b2f6e90d37a11",
            "attempt {} accepted: {} {}",
            record.id,
            record.kind,
            release.version
        );
        let flow = Self {
            host,
            settings,
            request,
            systemd,
            docker,
            admission,
            before,
            record,
            interrupt,
            tell,
            deaf: false,
            committed: false,
        };
        Ok(flow)
    }

    /// Every stage, and the outcome as the last thing that is written.
    pub(super) fn carry_out(mut self, release: &Release) -> Result<Record, Refusal> {
        let outcome = self.stages(release).unwrap_or_else(|failure| {
            let stage = self.record.stage.clone();
            let Failure { reason, error, causes, mut help } = failure;
            if reason == readiness::INTERRUPTED {
                return Outcome::Interrupted { stage, evidence: error };
            }
            // Nobody who asked for an upgrade can cancel it: its unit was stopped, or the system goes down.
            if self.request.mode == Mode::Upgrade && self.interrupt.terminated() {
                let evidence = format!(
                    "SIGTERM: its unit was stopped or ran out of time, or the system went down ({error})"
                );
                return Outcome::Interrupted { stage, evidence };
            }
            if self.record.installation == Installation::Replaced {
                help.extend(self.repair_help());
            }
            Outcome::Failed { stage, reason: reason.into(), error, causes, help }
        });
        if let Some(signal) =
            self.interrupt.requested().filter(|_| self.committed && !self.interrupt.terminated())
        {
            self.warn(format!("{signal} came after activation had begun: what was begun was finished"));
        }
        self.record.ended_at = Some(Timestamp::now());
        let ended = match &outcome {
            Outcome::Succeeded { version, .. } => format!("succeeded: {version} is running"),
            Outcome::Installed { version, .. } => format!("{version} is installed, not started"),
            Outcome::Failed { stage, error, .. } => format!("failed at {stage}: {error}"),
            Outcome::Interrupted { stage, .. } => format!("interrupted at {stage}"),
        };
        self.record.outcome = Some(outcome);
        tracing::info!(
            ployz_attempt = self.record.id,
            ployz_stage = self.record.stage.to_string(),
            message_id = "0c5d1e8f7a3b4926b1d4e7f8a9c02b33",
            "attempt {} {ended}",
            self.record.id
        );
        if let Err(e) = self.record.write(self.host, &self.admission) {
            // The outcome stands; that it can't be read later is said now.
            self.record.warnings.push(format!("the outcome could not be written to the record: {e}"));
        }
        // Whoever reads that it ended may ask for the next one at once.
        let Self { admission, mut record, tell, .. } = self;
        drop(admission);
        let at = record.ended_at.unwrap_or(record.updated_at);
        if tell(&Event { schema: SCHEMA, what: What::Outcome { record: &record }, at }).is_err() {
            record.warnings.push("nobody was there to be told the outcome".into());
        }
        Ok(record)
    }

    fn stages(&mut self, release: &Release) -> Result<Outcome, Failure> {
        self.event(Some(&release.version.to_string()));
        self.enter(Stage::Preflight)?;
        none_of("host", preflight::host_problems(self.host, self.systemd, room(self.host, release)))?;
        if self.request.mode != Mode::Upgrade {
            self.enter(Stage::Preparing)?;
            self.prepare()?;
        } else if let Err(e) = prepare::share_records(self.host, &self.admission) {
            self.warn(e);
        }
        let staging = Staging::make(self.host, &self.admission).map_err(|e| {
            Failure::new("staging", format!("making staging under {:?}: {e}", self.host.staging()))
        })?;
        self.enter(Stage::Acquiring)?;
        let acquired = self.acquire(release, &staging)?;
        self.enter(Stage::Verifying)?;
        let verified = self.verify(acquired)?;
        self.enter(Stage::Preflight)?;
        let staged = self.preflight(release, verified, &staging)?;
        self.enter(Stage::Activating)?;
        let activated = self.activate(staged)?;
        drop(staging);
        let Some(systemd) = self.systemd else {
            self.fact("installed, not started: systemd was not contacted");
            return Ok(Outcome::Installed { version: activated.version, sha256: activated.sha256 });
        };
        self.enter(Stage::Restarting)?;
        let restarted = self.restart(systemd, &activated)?;
        self.enter(Stage::Confirming)?;
        self.confirm(systemd, &activated, &restarted)
    }

    fn prepare(&mut self) -> Result<(), Failure> {
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
            Mode::Prepare => {
                let prepared = prepare::accounts(host, deadline, &self.admission).map_err(failed)?;
                self.prepared(prepared);
                prepare::directories(host, &self.admission).map_err(failed)?;
            }
        }
        if self.request.mode != Mode::InstallationOnly {
            let prepared = prepare::docker(host, self.docker, deadline, &self.admission).map_err(failed)?;
            self.prepared(prepared);
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

    fn preflight(
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
            Verified::Itself => {
                let sha256 = copy_exactly(self.host.program(), next).map_err(|e| {
                    Failure::new("disk", format!("copying the running executable to {next:?}: {e}"))
                })?;
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
                    return Err(Failure { causes, ..failure });
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

    fn activate(&mut self, staged: Staged) -> Result<Activated, Failure> {
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

    fn restart(&mut self, systemd: Systemd, activated: &Activated) -> Result<restart::Restarted, Failure> {
        let restarted = restart::restart(systemd, activated, &self.admission).map_err(|e| {
            Failure::new("restart", e).help("look at: systemctl status ployz.socket ployz.service")
        })?;
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

    fn confirm(
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
            restarts_before: restarted.restarts_before,
            replaced_pid: restarted.replaced_pid,
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
            )
        };
        if let Some((pid, after)) = ready {
            let fact =
                format!("{} is running (pid {pid}), ready after {} ms", activated.version, after.as_millis());
            self.fact(&fact);
        }
        let confirmed = confirmed.map_err(|not| {
            let logs = format!("journalctl -u {} -n 20", units::SERVICE);
            Failure::new(not.reason, not.observed).help(format!("its last words: {logs}"))
        })?;
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

    /// Writes that a stage begins, before anything of it is done. Before activation a wish to end is heard here.
    fn enter(&mut self, stage: Stage) -> Result<(), Failure> {
        if self.committed {
            if self.interrupt.terminated() {
                let error = format!(
                    "SIGTERM came before {stage}: what was switched is whole, and nothing was restarted"
                );
                return Err(Failure::new(readiness::INTERRUPTED, error));
            }
        } else {
            self.not_cancelled()?;
        }
        self.committed |= stage == Stage::Activating;
        self.record.stage = stage;
        let written = self.record.write(self.host, &self.admission);
        match written {
            Ok(()) => {}
            // What is switched must be finished; the outcome says that the record is behind.
            Err(e) if self.committed => {
                self.record.warnings.push(format!("the record could not be written: {e}"));
            }
            Err(e) => {
                return Err(Failure::new("record", format!("the attempt's record can't be written: {e}")));
            }
        }
        tracing::info!(
            ployz_attempt = self.record.id,
            ployz_stage = self.record.stage.to_string(),
            "attempt {}: {}",
            self.record.id,
            self.record.stage
        );
        self.event(None);
        Ok(())
    }

    /// Before activation: nobody asked for an end, and somebody listens.
    pub(super) fn not_cancelled(&self) -> Result<(), Failure> {
        if let Some(signal) = self.interrupt.requested() {
            return Err(Failure::cancelled(signal));
        }
        if self.deaf {
            return Err(Failure::new("cancelled", "cancelled: nobody reads the output any more"));
        }
        Ok(())
    }

    pub(super) fn fact(&mut self, fact: &str) {
        tracing::info!(
            ployz_attempt = self.record.id,
            ployz_stage = self.record.stage.to_string(),
            "{}: {fact}",
            self.record.stage
        );
        self.event(Some(fact));
    }

    fn warn(&mut self, warning: String) {
        tracing::warn!(
            ployz_attempt = self.record.id,
            ployz_stage = self.record.stage.to_string(),
            "{warning}"
        );
        self.record.warnings.push(warning);
    }

    fn event(&mut self, fact: Option<&str>) {
        let what = What::Stage { attempt: &self.record.id, stage: &self.record.stage, fact };
        self.deaf |= (self.tell)(&Event { schema: SCHEMA, what, at: Timestamp::now() }).is_err();
    }

    /// What to type when the installation was replaced and is not known to work.
    fn repair_help(&self) -> Vec<String> {
        let mut help = Vec::new();
        // The retained file itself says what it is.
        if let Ok(Some((_, sha256))) = on_disk(&self.host.previous()) {
            let described = self.before.inventory.describes(&sha256);
            let what = described.map_or_else(|| "the retained binary".to_owned(), |d| d.version.to_string());
            help.push(format!("put {what} back with: sudo /usr/local/bin/ployzd.previous install"));
        }
        help.push(format!("the whole story: {}", self.record.diagnostics));
        help
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

/// The room that a release needs on the way, in bytes: its archive, and the binary in it.
pub(super) fn room(host: &Host, release: &Release) -> u64 {
    let archive = match &release.source {
        Source::Local { archive, .. } => std::fs::metadata(archive).map_or(0, |meta| meta.len()),
        // Not known before it comes; what comes is bounded, and a full disk is named when it happens.
        Source::Published { .. } => MOST_ARCHIVE / 8,
        Source::Itself => std::fs::metadata(host.program()).map_or(0, |meta| meta.len()),
    };
    archive.min(MOST_ARCHIVE) * 3
}
