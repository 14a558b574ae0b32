//! `ployzd install`: from flags to a request, from events to a screen.

use std::io::{self, IsTerminal};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

use super::Exit;
use super::output::{self, Output, Style, error};
use super::ployzd::{DockerChoice, Install, StorageChoice};
use crate::host::Host;
use crate::install::admission::{Busy, Observed};
use crate::install::attempt::{Installation, Outcome, Record, Stage};
use crate::install::events::{Event, Refusal, What};
use crate::install::installed::Docker;
use crate::install::preflight::Problem;
use crate::install::staging::{self, RunsFrom};
use crate::install::{self, Mode, PoolOf, Request, Storage, Wanted};
use crate::interrupt::Interrupt;

/// Set for the copy that an installer becomes: whether it came from the installed path.
pub(super) const BECAME: &str = "PLOYZ_INSTALL_COPY";

/// Installs, and says how it went.
pub(crate) fn run(host: &Host, version: &'static str, arguments: &Install) -> Exit {
    if !host.privileged() {
        let help = format!("type: sudo {} install", own_path());
        let problem = Problem { what: "installing needs root, and this is not root".into(), help };
        return refuse(&Refusal::NotPermitted(problem), arguments.json);
    }
    let request = match request(version, arguments) {
        Ok(request) => request,
        Err(text) => {
            let help = "look at: ployzd install --help";
            if arguments.json {
                print_refused("usage", &[(text, help.into())]);
            } else {
                error(text, Some(help));
            }
            return Exit::Usage;
        }
    };
    if arguments.dry_run {
        return dry_run(host, &request, arguments.json);
    }
    let staged = install::can_run_children(host).and_then(|()| {
        let refused = |e| {
            let what = format!("making a copy to run from in {}: {e}", host.own_copies().display());
            Refusal::one(what, "look at: findmnt -T /usr/local/lib; df -h /usr/local")
        };
        run_from_staging(host, request.mode != Mode::InstallationOnly).map_err(refused)
    });
    if let Err(refusal) = staged {
        return refuse(&refusal, arguments.json);
    }
    // Whatever is made has the mode that it is given; a umask of the caller's shall not take from it.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    if request.mode != Mode::InstallationOnly {
        log();
    }
    let interrupt = match Interrupt::hold() {
        Ok(interrupt) => interrupt,
        Err(e) => {
            error(format!("holding signals back: {e}; nothing was changed"), None);
            return Exit::Unchanged;
        }
    };
    let mut screen = Screen::new(host, "installing", arguments.json);
    let installed = install::install(host, &request, &interrupt, &mut |event| screen.show(event));
    screen.end();
    match installed {
        Ok(record) => {
            if !arguments.json {
                conclude(host, &record);
            }
            exit_of(&record)
        }
        Err(refusal) => refuse(&refusal, arguments.json),
    }
}

/// Says what an installation would change, file by file.
fn dry_run(host: &Host, request: &Request, json: bool) -> Exit {
    let planned = Interrupt::hold()
        .map_err(|e| Refusal::one(format!("holding signals back: {e}"), "try again"))
        .and_then(|interrupt| install::plan::plan(host, request, &interrupt));
    let plan = match planned {
        Ok(plan) => plan,
        Err(refusal) => return refuse(&refusal, json),
    };
    if show_plan(&plan, json).is_ok() { Exit::Done } else { Exit::Unknown }
}

fn show_plan(plan: &install::plan::Plan, json: bool) -> io::Result<()> {
    let mut out = output::stdout();
    if json {
        return outcome_without_record(&mut out, "plan", &serde_json::json!(plan));
    }
    let from = plan.from.map(|from| format!("{from} → ")).unwrap_or_default();
    out.line(format!("install {from}{}: nothing was changed; it would do this:", plan.target))?;
    for change in &plan.changes {
        out.line(format!("  {}  {}", change.what, out.styled(Style::Dim, &change.how)))?;
    }
    if plan.changes.is_empty() {
        out.line("  no file would change; what runs is compared, and restarted only if it is another")?;
    }
    plan.notes.iter().try_for_each(|note| out.line(format!("note: {note}")))
}

fn request(version: &str, arguments: &Install) -> Result<Request, String> {
    let own_version =
        version.parse().map_err(|_| format!("this executable has no release version ({version})"))?;
    let wanted = match (arguments.version, arguments.channel) {
        (Some(_), Some(_)) if arguments.archive.is_none() => {
            return Err("--version and --channel are two answers to one question".into());
        }
        (Some(version), _) => Wanted::Exact(version),
        (None, Some(channel)) => Wanted::Channel(channel),
        (None, None) => Wanted::Itself,
    };
    let of = match (&arguments.pool_device, arguments.pool_file) {
        (Some(device), _) => Some(PoolOf::Device(device.clone())),
        (None, Some(size)) => Some(PoolOf::File(size)),
        (None, None) => None,
    };
    let storage = match arguments.storage {
        Some(StorageChoice::None) if of.is_some() => {
            return Err("--storage none makes no pool: leave --pool-device and --pool-file out".into());
        }
        Some(StorageChoice::None) => Some(Storage::None),
        Some(StorageChoice::Zfs) => Some(Storage::Zfs(of)),
        None => None,
    };
    let mode = match (arguments.software_only, arguments.installation_only) {
        (true, _) => Mode::SoftwareOnly,
        (_, true) => Mode::InstallationOnly,
        _ => Mode::Prepare,
    };
    Ok(Request {
        wanted,
        label: arguments.channel,
        local: arguments.archive.clone().zip(arguments.checksums.clone()),
        mode,
        docker: arguments.docker.map(|choice| match choice {
            DockerChoice::Auto => Docker::Auto,
            DockerChoice::None => Docker::None,
        }),
        storage,
        operators: arguments.group_user.clone(),
        own_version,
    })
}

/// An installer that is about to replace its own executable runs from a copy instead; and where systemd runs, in a
/// scope of its own, so that it outlives the login session. One exec does both, once.
pub(super) fn run_from_staging(host: &Host, systemd: bool) -> io::Result<()> {
    let from = staging::runs_from(host)?;
    if let RunsFrom::OwnCopy(dir) = &from {
        staging::unlink_own_copy(dir);
    }
    if std::env::var_os(BECAME).is_some() {
        // A copy that still looks like the installation would become itself for ever.
        let again = from == RunsFrom::Installation;
        return if again { Err(io::Error::other("the copy runs from the installed path")) } else { Ok(()) };
    }
    let scoped = systemd && host.systemd_runs() && !staging::in_own_unit();
    let scope = match scoped.then(staging::try_scope) {
        None => None,
        Some(Ok(scope)) => Some(scope),
        Some(Err(e)) => {
            let note = format!(
                "note: this installation ends with your login session, since it can't have its own scope: {e}"
            );
            let _ = output::stderr().line(note);
            None
        }
    };
    let program = match from {
        RunsFrom::Installation => staging::copy_of_own(host)?,
        RunsFrom::Elsewhere if scope.is_some() => std::fs::read_link("/proc/self/exe")?,
        RunsFrom::Elsewhere | RunsFrom::OwnCopy(_) => return Ok(()),
    };
    Err(staging::become_program(&program, scope.as_deref(), &[(BECAME, "1")]))
}

pub(super) fn own_path() -> String {
    let path = std::env::current_exe().unwrap_or_else(|_| Path::new("/usr/local/bin/ployzd").to_owned());
    path.display().to_string()
}

/// Logs to journald where it is, to stderr elsewhere; `PLOYZ_LOG` chooses how much.
pub(crate) fn log() {
    use tracing_subscriber::filter::LevelFilter;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;
    let asked = std::env::var("PLOYZ_LOG").ok().and_then(|text| text.parse().ok());
    let level = asked.unwrap_or(LevelFilter::INFO);
    let registry = tracing_subscriber::registry().with(level);
    // Without a prefix: PLOYZ_ATTEMPT and PLOYZ_STAGE are what people are told to search for.
    if let Ok(journal) = tracing_journald::layer() {
        registry.with(journal.with_field_prefix(None).with_syslog_identifier("ployzd".into())).init();
    } else if asked.is_some() {
        registry.with(tracing_subscriber::fmt::layer().with_writer(io::stderr)).init();
    }
}

pub(crate) fn exit_of(record: &Record) -> Exit {
    match &record.outcome {
        Some(Outcome::Succeeded { .. } | Outcome::Installed { .. }) => Exit::Done,
        Some(Outcome::Failed { .. }) if record.installation == Installation::Unchanged => Exit::Unchanged,
        Some(Outcome::Failed { .. }) => Exit::Replaced,
        Some(Outcome::Interrupted { .. }) | None => Exit::Unknown,
    }
}

/// The screen of one installation.
pub(super) struct Screen {
    out: Output<io::Stdout>,
    json: bool,
    /// "installing", "putting back"
    doing: &'static str,
    /// "web-1 (Debian GNU/Linux 13 (trixie), x86_64)"
    on: String,
    bar: Option<ProgressBar>,
}

impl Screen {
    pub(super) fn new(host: &Host, doing: &'static str, json: bool) -> Self {
        let os = host.os().unwrap_or_else(|| "Linux".into());
        let on = format!("{} ({os}, {})", host.name(), std::env::consts::ARCH);
        Self { out: output::stdout(), json, doing, on, bar: None }
    }

    pub(super) fn show(&mut self, event: &Event<'_>) -> io::Result<()> {
        if self.json {
            return self.out.line(serde_json::to_string(event).map_err(io::Error::other)?);
        }
        match &event.what {
            What::Stage { stage: Stage::Accepted, fact: Some(version), attempt } => {
                let (on, doing) = (&self.on, self.doing);
                self.out.line(format!("{doing} ployzd {version} on {on}, attempt {}", &attempt[..8]))
            }
            What::Stage { stage, fact: Some(fact), .. } => {
                self.end();
                self.out.field(past(stage), fact)
            }
            What::Stage { fact: None, .. } | What::Outcome { .. } => Ok(()),
            What::Progress { bytes, total, .. } => {
                self.progress(*bytes, *total);
                Ok(())
            }
        }
    }

    fn progress(&mut self, bytes: u64, total: Option<u64>) {
        if !io::stdout().is_terminal() {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = "  acquiring   {bar:24} {bytes} of {total_bytes}  {bytes_per_sec}";
            let bar = ProgressBar::new(total.unwrap_or(0));
            if let Ok(style) = ProgressStyle::with_template(style) {
                bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏░"));
            }
            bar
        });
        bar.set_position(bytes);
    }

    pub(super) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// What a stage is called once a fact of it is established.
fn past(stage: &Stage) -> &str {
    match stage {
        Stage::Accepted => "accepted",
        Stage::Preparing => "prepared",
        Stage::Acquiring => "acquired",
        Stage::Verifying => "verified",
        Stage::Preflight => "preflight",
        Stage::Activating => "activated",
        Stage::Restarting => "restarted",
        Stage::Confirming => "confirmed",
        Stage::Other(name) => name,
    }
}

/// The last lines: how it ended, what state the Machine is in, what to type next.
pub(super) fn conclude(host: &Host, record: &Record) {
    let mut out = output::stdout();
    for warning in &record.warnings {
        let _ = out.line(format!("note: {warning}"));
    }
    let name = host.name();
    match &record.outcome {
        Some(Outcome::Succeeded { version, nothing_was_needed: true, pid, .. }) => {
            let _ = out.line(format!("Nothing was needed: {version} is installed and running (pid {pid})."));
        }
        Some(Outcome::Succeeded { version, .. }) => {
            let _ = out.line(format!("Machine {name} is ready: {version} is running."));
            let _ = out.line("Look at it with: ployzd status");
        }
        Some(Outcome::Installed { version, .. }) => {
            let _ = out.line(format!(
                "{version} is installed, not started: it starts with the next boot of this system."
            ));
        }
        Some(Outcome::Failed { stage, error, causes, help, .. }) => {
            let mut err = output::stderr();
            let _ = err.line(err.styled(Style::Red, format!("failed at {stage} ({})", record.id)));
            for text in std::iter::once(error).chain(causes) {
                let _ = err.line(format!("  {text}"));
            }
            let _ = err.line(state_now(record));
            for text in help.iter().collect::<std::collections::BTreeSet<_>>() {
                let _ = err.help(text);
            }
        }
        Some(Outcome::Interrupted { stage, evidence }) => {
            error(format!("interrupted at {stage}: {evidence}"), None);
            let mut err = output::stderr();
            let _ = err.line(state_now(record));
            let _ =
                err.help("see what is so now, then go on: ployzd status; sudo /usr/local/bin/ployzd install");
        }
        None => {
            error("how it ended is not known", Some("look at: ployzd status"));
        }
    }
}

/// "This Machine's installation is unchanged (1.4.0)."
fn state_now(record: &Record) -> String {
    match (record.installation, record.from) {
        (Installation::Unchanged, Some(from)) => format!("The installation is unchanged: {from}."),
        (Installation::Unchanged, None) => "Nothing was installed.".to_owned(),
        (Installation::Replaced, _) => {
            let target = record.target.map(|target| target.to_string()).unwrap_or_default();
            format!(
                "The installation was replaced: {target} is in place ({}). Nothing is rolled back by itself.",
                record.switched.join(", ")
            )
        }
    }
}

/// Says why nothing was accepted.
pub(super) fn refuse(refusal: &Refusal, json: bool) -> Exit {
    let (exit, problems) = match refusal {
        Refusal::Busy(busy) => (Exit::Busy, busy_lines(busy)),
        Refusal::NotPermitted(problem) => {
            (Exit::NotPermitted, vec![(problem.what.clone(), problem.help.clone())])
        }
        Refusal::Refused(problems) => {
            (Exit::Unchanged, problems.iter().map(|p| (p.what.clone(), p.help.clone())).collect())
        }
    };
    if json {
        let reason = match exit {
            Exit::Busy => "busy",
            Exit::NotPermitted => "not_permitted",
            _ => "refused",
        };
        print_refused(reason, &problems);
        return exit;
    }
    let mut err = output::stderr();
    let _ = err.line("refused; nothing was accepted and nothing was changed:");
    for (what, _) in &problems {
        let _ = err.line(format!("  {}", err.styled(Style::Red, what)));
    }
    for (_, help) in problems.iter().filter(|(_, help)| !help.is_empty()) {
        let _ = err.help(help);
    }
    exit
}

/// The outcome of what was not accepted, as JSON.
pub(crate) fn print_refused(reason: &str, problems: &[(String, String)]) {
    let texts: Vec<_> =
        problems.iter().map(|(what, help)| serde_json::json!({"what": what, "help": help})).collect();
    let refused = serde_json::json!({"reason": reason, "problems": texts});
    let _ = outcome_without_record(&mut output::stdout(), "refused", &refused);
}

/// The last line of JSON where nothing was accepted: no record, and this instead.
fn outcome_without_record(
    out: &mut Output<io::Stdout>,
    what: &str,
    value: &serde_json::Value,
) -> io::Result<()> {
    let outcome = serde_json::json!({
        "schema": install::events::SCHEMA, "event": "outcome", "at": jiff::Timestamp::now(), "record": null,
        what: value,
    });
    out.line(outcome.to_string())
}

fn busy_lines(busy: &Busy) -> Vec<(String, String)> {
    let help = match busy.observed {
        Observed::Mutating { .. } => {
            "wait for it; if it never ends: systemctl stop ployz.socket ployz.service ployz-deploy.socket 'ployz-deploy@*.service'"
        }
        _ => "wait for it, then look at: ployzd status",
    };
    let head = (format!("busy: {}", busy.what()), help.to_owned());
    let holders = busy.processes.iter().map(|process| {
        let text = format!(
            "admission is held by pid {} (uid {}, {}, {})",
            process.pid, process.uid, process.executable, process.unit
        );
        (text, String::new())
    });
    std::iter::once(head).chain(holders).collect()
}
