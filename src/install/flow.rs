//! The accepted part of an installation: every stage in its order, with its record written as it begins. What a stage
//! does is in `steps` and `acquisition`.

use jiff::Timestamp;

use super::activation::Before;
use super::admission::Admission;
use super::archive::MOST_ARCHIVE;
use super::attempt::{Installation, Outcome, Record, Stage};
use super::events::{Event, Refusal, SCHEMA, Tell, What};
use super::installed::{Docker, Inventory, on_disk};
use super::preflight::{self, Problem};
use super::source::Settings;
use super::staging::Staging;
use super::{Mode, Release, Request, Source, host as prepare, readiness, records};
use crate::durable::writable_by_others;
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::systemd::Systemd;

/// An accepted attempt on its way.
pub(super) struct Flow<'a> {
    pub(super) host: &'a Host,
    pub(super) settings: &'a Settings,
    pub(super) request: &'a Request,
    pub(super) systemd: Option<Systemd>,
    pub(super) docker: Docker,
    pub(super) admission: Admission,
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

    pub(super) fn causes(mut self, causes: Vec<String>) -> Self {
        self.causes = causes;
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
pub(super) fn none_of(reason: &'static str, problems: Vec<Problem>) -> Result<(), Failure> {
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
        let answer = systemd.and_then(|systemd| readiness::look(host, systemd, &[]).ok());
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
        let mut problems = preflight::host_problems(self.host, self.systemd, room(self.host, release));
        if self.request.mode == Mode::Prepare {
            problems.extend(prepare::docker::problems(self.host, self.systemd, self.docker));
            problems.extend(prepare::storage::problems(self.host, self.request.storage.as_ref()));
        }
        none_of("host", problems)?;
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
        if !self.admission.is_in_place(self.host) {
            let error = format!(
                "{} was removed or replaced: another installer could not see this one",
                self.host.admission().display()
            );
            match self.committed {
                false => {
                    return Err(
                        Failure::new("admission_lost", error).help("find out who removed it, then try again")
                    );
                }
                true => self.warn(error),
            }
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

    pub(super) fn warn(&mut self, warning: String) {
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
            help.push(format!("put {what} back with: sudo /usr/local/bin/ployzd.previous recover"));
        }
        help.push(format!("the whole story: {}", self.record.diagnostics));
        help
    }
}

/// The room that a release needs on the way, in bytes: its archive, and the binary in it.
pub(super) fn room(host: &Host, release: &Release) -> u64 {
    let archive = match &release.source {
        Source::Local { archive, .. } => std::fs::metadata(archive).map_or(0, |meta| meta.len()),
        // Not known before it comes; what comes is bounded, and a full disk is named when it happens.
        Source::Published { .. } => MOST_ARCHIVE / 8,
        Source::Itself => std::fs::metadata(host.program()).map_or(0, |meta| meta.len()),
        Source::Retained => std::fs::metadata(host.previous()).map_or(0, |meta| meta.len()),
    };
    archive.min(MOST_ARCHIVE) * 3
}
