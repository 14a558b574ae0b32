//! systemd, through `systemctl` and `systemd-analyze`: each call bounded, each answer parsed at the edge.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use crate::command::{CommandError, Run};

/// What PID 1 says of a unit. Fields that it did not answer are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Unit {
    /// `loaded`, `masked`, `not-found`, `bad-setting`…
    pub(crate) load: String,
    /// `active`, `activating`, `failed`, `inactive`…
    pub(crate) active: String,
    /// `running`, `auto-restart`, `listening`…
    pub(crate) sub: String,
    /// `enabled`, `disabled`, `masked`…
    pub(crate) file_state: String,
    /// The file that is in effect.
    pub(crate) fragment: String,
    /// The main process, 0 for none.
    pub(crate) main_pid: u32,
    /// Automatic restarts since it was last started on request.
    pub(crate) restarts: u32,
    /// `success`, `exit-code`, `signal`, `timeout`…
    pub(crate) result: String,
    /// Of the last main process: 1 exited, 2 killed, 3 dumped.
    pub(crate) exit_code: String,
    /// Of the last main process: status or signal number.
    pub(crate) exit_status: String,
    /// When the main process started, in microseconds of the monotonic clock.
    pub(crate) since_monotonic: u64,
    /// When the main process started, as systemd prints it.
    pub(crate) since: String,
    /// The executables of the effective `ExecStart=`.
    pub(crate) exec_start: Vec<String>,
    /// Whether the file on disk differs from what PID 1 has loaded.
    pub(crate) needs_reload: bool,
    /// What a socket listens on.
    pub(crate) listen: Vec<String>,
    /// The control group of a unit that runs: `/system.slice/ployz.service`.
    pub(crate) control_group: String,
}

impl Unit {
    /// For how long the main process has run; zero when none runs, or when that can't be told.
    pub(crate) fn age(&self) -> Duration {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map(Duration::from);
        match (now, self.main_pid, self.since_monotonic) {
            (Err(_), ..) | (_, 0, _) | (.., 0) => Duration::ZERO,
            (Ok(now), _, since) => now.saturating_sub(Duration::from_micros(since)),
        }
    }
}

const PROPERTIES: &str = "Id,LoadState,ActiveState,SubState,UnitFileState,FragmentPath,MainPID,NRestarts,Result,\
    ExecMainCode,ExecMainStatus,ExecMainStartTimestamp,ExecMainStartTimestampMonotonic,ExecStart,NeedDaemonReload,Listen,\
    ControlGroup";

/// What systemctl says when PID 1 is away.
const AWAY: [&str; 4] = [
    "Transport endpoint is not connected",
    "Connection reset by peer",
    "Failed to connect to",
    "Remote peer disconnected",
];
const MOST_TRIES: u32 = 6;
const AGAIN: Duration = Duration::from_millis(500);

/// systemd as PID 1 of this host, with the deadline of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Systemd {
    deadline: Duration,
}

impl Systemd {
    /// Calls are ended after `deadline`.
    pub(crate) fn new(deadline: Duration) -> Self {
        Self { deadline }
    }

    /// The same with another deadline.
    pub(crate) fn within(self, deadline: Duration) -> Self {
        Self { deadline }
    }

    /// Calls systemctl. While PID 1 re-executes itself nobody answers for a moment: that is waited for, and every call
    /// here may be repeated.
    fn systemctl<S: AsRef<std::ffi::OsStr>>(
        self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<crate::command::Ended, CommandError> {
        let arguments: Vec<S> = arguments.into_iter().collect();
        let mut tries = 0;
        loop {
            tries += 1;
            let run = Run::new("systemctl", self.deadline).args(["--no-pager", "--no-ask-password"]);
            match run.args(&arguments).check() {
                Err(CommandError::Status { stderr, .. })
                    if tries < MOST_TRIES && AWAY.iter().any(|text| stderr.contains(text)) =>
                {
                    std::thread::sleep(AGAIN);
                }
                result => return result,
            }
        }
    }

    /// What PID 1 says of these units, in their order.
    pub(crate) fn show(self, units: &[&str]) -> Result<Vec<Unit>, CommandError> {
        let property = format!("--property={PROPERTIES}");
        let ended = self.systemctl(["show", &property, "--"].iter().chain(units))?;
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        let mut shown: Vec<_> = text.split("\n\n").map(parse).collect();
        shown.resize(units.len(), Unit::default());
        Ok(shown)
    }

    /// Reads changed unit files.
    pub(crate) fn daemon_reload(self) -> Result<(), CommandError> {
        self.systemctl(["daemon-reload"]).map(drop)
    }

    /// Enables units, without starting them.
    pub(crate) fn enable(self, units: &[&str]) -> Result<(), CommandError> {
        self.systemctl(["enable", "--quiet", "--"].iter().chain(units)).map(drop)
    }

    /// Disables and stops units.
    pub(crate) fn disable_now(self, units: &[&str]) -> Result<(), CommandError> {
        self.systemctl(["disable", "--now", "--quiet", "--"].iter().chain(units)).map(drop)
    }

    /// Starts units and waits for their jobs.
    pub(crate) fn start(self, units: &[&str]) -> Result<(), CommandError> {
        self.systemctl(["start", "--"].iter().chain(units)).map(drop)
    }

    /// Stops units, in one transaction.
    pub(crate) fn stop(self, units: &[&str]) -> Result<(), CommandError> {
        self.systemctl(["stop", "--"].iter().chain(units)).map(drop)
    }

    /// Kills every process of units.
    pub(crate) fn kill(self, units: &[&str]) -> Result<(), CommandError> {
        self.systemctl(["kill", "--signal=KILL", "--"].iter().chain(units)).map(drop)
    }

    /// Forgets failures and start limits of units.
    pub(crate) fn reset_failed(self, units: &[&str]) -> Result<(), CommandError> {
        self.systemctl(["reset-failed", "--"].iter().chain(units)).map(drop)
    }

    /// Restarts units and waits for their jobs.
    pub(crate) fn restart(self, units: &[&str]) -> Result<(), CommandError> {
        self.systemctl(["restart", "--"].iter().chain(units)).map(drop)
    }

    /// Queues the restart of a service, without waiting for it.
    pub(crate) fn queue_restart(self, unit: &str) -> Result<(), CommandError> {
        self.systemctl(["restart", "--no-block", "--", unit]).map(drop)
    }

    /// What `systemd-analyze verify` says of unit files, a line a fact. Its status means nothing: it is 0 even for
    /// unknown keys.
    pub(crate) fn verify(self, files: &[&Path]) -> Result<Vec<String>, CommandError> {
        let run = Run::new("systemd-analyze", self.deadline).args(["verify", "--man=no", "--"]).args(files);
        Ok(run.run()?.stderr.lines().map(str::to_owned).collect())
    }

    /// The version of systemd: 257.
    pub(crate) fn version(self) -> Result<u32, CommandError> {
        let ended = self.systemctl(["--version"])?;
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        Ok(text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or_default())
    }
}

fn parse(block: &str) -> Unit {
    let mut values: HashMap<&str, Vec<&str>> = HashMap::new();
    for (key, value) in block.lines().filter_map(|line| line.split_once('=')) {
        values.entry(key).or_default().push(value);
    }
    let one =
        |key: &str| values.get(key).and_then(|v| v.first()).map(|v| (*v).to_owned()).unwrap_or_default();
    let all = |key: &str| values.get(key).cloned().unwrap_or_default();
    Unit {
        load: one("LoadState"),
        active: one("ActiveState"),
        sub: one("SubState"),
        file_state: one("UnitFileState"),
        fragment: one("FragmentPath"),
        main_pid: one("MainPID").parse().unwrap_or_default(),
        restarts: one("NRestarts").parse().unwrap_or_default(),
        result: one("Result"),
        exit_code: one("ExecMainCode"),
        exit_status: one("ExecMainStatus"),
        since: one("ExecMainStartTimestamp"),
        since_monotonic: one("ExecMainStartTimestampMonotonic").parse().unwrap_or_default(),
        // { path=/usr/local/bin/ployzd ; argv[]=/usr/local/bin/ployzd daemon ; … }
        exec_start: all("ExecStart")
            .iter()
            .filter_map(|v| {
                v.split_once("path=").and_then(|(_, rest)| rest.split(" ;").next()).map(str::to_owned)
            })
            .collect(),
        control_group: one("ControlGroup"),
        needs_reload: one("NeedDaemonReload") == "yes",
        // /run/ployz/ployz.sock (Stream)
        listen: all("Listen").iter().filter_map(|v| v.split(" (").next()).map(str::to_owned).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn what_systemctl_shows_is_read() {
        let unit = parse(
            "Id=ployz.service\nMainPID=812\nNRestarts=2\nLoadState=loaded\nActiveState=active\n\
             ExecStart={ path=/usr/local/bin/ployzd ; argv[]=/usr/local/bin/ployzd daemon ; ignore_errors=no }\n\
             NeedDaemonReload=no\nFragmentPath=/usr/local/lib/systemd/system/ployz.service\n",
        );
        assert_eq!((unit.main_pid, unit.restarts, unit.active.as_str()), (812, 2, "active"));
        assert_eq!(unit.exec_start, ["/usr/local/bin/ployzd"]);
        let socket = parse("Listen=/run/ployz/ployz.sock (Stream)\nActiveState=active\n");
        assert_eq!(socket.listen, ["/run/ployz/ployz.sock"]);
    }
}
