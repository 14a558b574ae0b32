//! What can be seen of a machine: from its files, its systemd and its processes, never from what is said of them.

use serde_json::Value;

use crate::machine::Machine;

/// The path of everything.
const PLOYZD: &str = "/usr/local/bin/ployzd";

/// What is shown of a machine when its test has failed: a title, and what is run there.
pub(crate) const SECTIONS: [(&str, &str); 4] = [
    ("status", "/usr/local/bin/ployzd status"),
    (
        "attempts",
        "cd /var/lib/ployz-install && cat admission.lock; ls -la attempts; tail -n +1 attempts/*.json",
    ),
    (
        "files",
        "ls -laR /usr/local/bin /usr/local/lib/ployz /usr/local/lib/systemd; cat /etc/ployz/install.json",
    ),
    ("journal", "journalctl -b --no-pager -n 80"),
];

/// Everything that must be the same when nothing was done: files with inode, times and mode, processes, and how often
/// systemd has loaded its units.
const WATCH: &str = r"
    stat -c '%n inode %i mtime %y ctime %z %U:%G %a' /usr/local/bin/* /usr/local/lib/ployz/installed.json \
        /usr/local/lib/systemd/system/ployz* /usr/local/lib/sysusers.d/ployz.conf /etc/systemd/system/*/ployz* \
        /etc/passwd /etc/group
    find /var/lib/ployz -printf '%p %i %T@ %C@ %u:%g %m\n'
    systemctl show -p Id,MainPID,NRestarts,InvocationID,ActiveState ployz.service ployz.socket
    echo reloads $(journalctl -b _PID=1 -o cat | grep -ciE '^reload')";

/// A machine at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched(pub(crate) Vec<String>);

impl Watched {
    /// Fails when a later moment differs, and names the lines.
    #[track_caller]
    pub fn assert_same(&self, later: &Self) {
        let gone = self.0.iter().filter(|line| !later.0.contains(line)).map(|line| format!("- {line}"));
        let new = later.0.iter().filter(|line| !self.0.contains(line)).map(|line| format!("+ {line}"));
        let differ: Vec<String> = gone.chain(new).collect();
        assert!(differ.is_empty(), "something was touched:\n{}", differ.join("\n"));
    }
}

/// The daemon's process, as the kernel and systemd show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its main process; 0 when there is none.
    pub pid: u32,
    /// `active`, …
    pub state: String,
    /// Automatic restarts.
    pub restarts: u32,
    /// Whether `/proc/PID/exe` is the file at `/usr/local/bin/ployzd`, by device and inode.
    pub runs_installed: bool,
    /// Of the file that the process runs.
    pub sha256: String,
}

impl Machine {
    /// Everything that must be the same when nothing is done.
    #[track_caller]
    pub fn watch(&self) -> Watched {
        Watched(self.run(WATCH).stdout.lines().map(str::to_owned).collect())
    }

    /// The daemon's process.
    #[track_caller]
    pub fn daemon(&self) -> Facts {
        let shown = self.run(&format!(
            "systemctl show -p MainPID,ActiveState,NRestarts ployz.service
             pid=$(systemctl show -P MainPID ployz.service)
             [ $pid = 0 ] || {{ echo exe=$(stat -L -c %d:%i /proc/$pid/exe); sha256sum /proc/$pid/exe; }}
             echo file=$(stat -c %d:%i {PLOYZD})"
        ));
        let field = |name: &str| {
            let line = shown.stdout.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            line.unwrap_or_default().to_owned()
        };
        let digest =
            shown.stdout.lines().find(|line| line.contains("/proc/")).map(|line| line[..64].to_owned());
        Facts {
            pid: field("MainPID").parse().unwrap_or(0),
            state: field("ActiveState"),
            restarts: field("NRestarts").parse().unwrap_or(0),
            runs_installed: !field("exe").is_empty() && field("exe") == field("file"),
            sha256: digest.unwrap_or_default(),
        }
    }

    /// Fails unless this version, with this digest, is installed, running from the installed file, ready, and known
    /// as that to everyone who says something of it.
    #[track_caller]
    pub fn assert_runs(&self, version: &str, sha256: &str) -> Facts {
        let daemon = self.daemon();
        assert_eq!((daemon.state.as_str(), daemon.runs_installed), ("active", true), "{daemon:?}");
        assert_eq!(daemon.sha256, sha256, "the digest of /proc/{}/exe", daemon.pid);
        assert_eq!(self.sha256(PLOYZD), sha256, "the digest of {PLOYZD}");
        let api = self.api();
        assert_eq!(api["version"], version, "{api}");
        assert_eq!(api["ready"], true, "{api}");
        assert_eq!(api["pid"], daemon.pid, "{api}");
        assert_eq!(api["executable_sha256"], sha256, "{api}");
        let current = self.inventory()["current"].clone();
        assert_eq!(current["version"], version, "{current}");
        assert_eq!(current["sha256"], sha256, "{current}");
        assert_eq!(current["confirmed"], true, "{current}");
        self.run(&format!("{PLOYZD} status")).ok();
        daemon
    }

    /// What the Machine API says.
    #[track_caller]
    pub fn api(&self) -> Value {
        self.run("curl -fsS -m 10 --unix-socket /run/ployz/ployz.sock http://machine/v1/machine")
            .expect(0)
            .json()
    }

    /// `ployzd status --json`, whatever its exit code.
    #[track_caller]
    pub fn status(&self) -> Value {
        self.run(&format!("{PLOYZD} status --json")).json()
    }

    /// `installed.json`.
    #[track_caller]
    pub fn inventory(&self) -> Value {
        self.run("cat /usr/local/lib/ployz/installed.json").expect(0).json()
    }

    /// The ids of the recorded attempts.
    #[track_caller]
    pub fn attempts(&self) -> Vec<String> {
        let listed = self.run("ls /var/lib/ployz-install/attempts 2>/dev/null");
        let ids = listed.stdout.lines().filter_map(|name| name.strip_suffix(".json"));
        ids.filter(|id| !id.contains('.')).map(str::to_owned).collect()
    }

    /// The record of an attempt.
    #[track_caller]
    pub fn attempt(&self, id: &str) -> Value {
        self.run(&format!("cat /var/lib/ployz-install/attempts/{id}.json")).expect(0).json()
    }

    /// As `sha256sum` inside says it.
    #[track_caller]
    pub fn sha256(&self, path: &str) -> String {
        let run = self.run(&format!("sha256sum {path}")).expect(0);
        run.text().split(' ').next().unwrap_or_default().to_owned()
    }

    /// Fails unless each path is of this type, owner, group and mode, as in `file root:root 755`.
    #[track_caller]
    pub fn assert_modes(&self, expected: &[(&str, &str)]) {
        let paths: Vec<&str> = expected.iter().map(|(path, _)| *path).collect();
        let shown = self.run(&format!("stat -c '%n %F %U:%G %a' {}", paths.join(" ")));
        let wanted = expected.iter().map(|(path, mode)| {
            let (kind, rest) = mode.split_once(' ').unwrap_or_default();
            let kind = if kind == "file" { "regular file" } else { kind };
            format!("{path} {kind} {rest}")
        });
        let seen: Vec<String> =
            shown.both().lines().map(|line| line.replace("regular empty file", "regular file")).collect();
        let missing: Vec<String> = wanted.filter(|line| !seen.contains(line)).collect();
        assert!(missing.is_empty(), "expected\n{}\nand saw\n{}", missing.join("\n"), seen.join("\n"));
    }

    /// Fails unless no attempt left anything behind: staged archives, next executables, own copies, bootstraps.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let left = self.run(
            "cd /usr/local; find lib/ployz/staging lib/ployz/bootstrap lib/ployz/self -mindepth 1 2>/dev/null
             find bin -name '.*' ! -name .; find lib/ployz lib/systemd lib/sysusers.d -name '.*'; true",
        );
        assert_eq!(left.text(), "", "something was left behind");
    }
}
