//! A process of its own for a test: this test binary again, told what to be.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use jiff::Timestamp;
use ployz::host::Host;
use ployz::install::admission::{Admission, Holder, MutationAdmission};
use ployz::install::events::{Refusal, What};
use ployz::install::install;
use ployz::interrupt::Interrupt;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::world::{PLOYZD, World, exact, left_over};

const ROLE: &str = "PLOYZ_TEST_ROLE";
/// Before what a child says, since the test harness talks too.
const MARK: &str = "child: ";

/// What a process is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Installs a version, and does this at events.
    Installer { version: String, at: At },
    /// Holds admission as an installer does.
    Holder,
    /// Holds admission as a mutation does.
    Mutation,
}

/// What an installer does at events, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum At {
    /// Nothing.
    Nothing,
    /// Says each, and goes on.
    Say,
    /// Says this one, and stops for ever.
    Park(usize),
}

/// An installer.
pub(crate) fn installer(version: &str, at: At) -> Role {
    Role::Installer { version: version.to_owned(), at }
}

/// A running process. Killed when it is dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

/// Starts a process on a world's host. The caller has the right to be alone.
pub(crate) fn start(world: &World, role: &Role) -> Running {
    run(world, role, Command::new(std::env::current_exe().unwrap()))
}

/// Starts a process that sees other filesystems: `mounts` is a script that mounts them below `$root`, the host's root, as root
/// of a user namespace.
pub(crate) fn start_under(world: &World, role: &Role, mounts: &str) -> Running {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "--", "sh", "-ec"]);
    command
        .arg(format!("root=$0\n{mounts}\nexec \"$@\""))
        .arg(world.root())
        .arg(std::env::current_exe().unwrap());
    run(world, role, command)
}

fn run(world: &World, role: &Role, mut command: Command) -> Running {
    let told = serde_json::to_string(&(world.root(), role)).unwrap();
    let mut child = command
        .args(["--exact", "child::is_what_it_is_told", "--ignored", "--nocapture", "--test-threads", "1"])
        .env(ROLE, told)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    Running { child, lines }
}

impl Running {
    /// The next thing that it says; `Null` when it has ended.
    pub(crate) fn says(&mut self) -> Value {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return Value::Null;
            }
            if let Some((_, said)) = line.split_once(MARK) {
                return serde_json::from_str(said).unwrap();
            }
        }
    }

    /// Ends it as a power cut would: at once, with nothing done about it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: &Value) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{MARK}{what}");
    let _ = out.flush();
}

fn park() -> ! {
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}

#[test]
#[ignore = "not a test: what other tests start as processes of their own"]
fn is_what_it_is_told() {
    let Ok(told) = std::env::var(ROLE) else { return };
    let (root, role): (std::path::PathBuf, Role) = serde_json::from_str(&told).unwrap();
    let host = Host::under(&root, Path::new(PLOYZD));
    match role {
        Role::Installer { version, at } => installs(&host, &root, &version, at),
        Role::Holder => {
            let (pid, since) = (std::process::id(), Timestamp::now());
            let holder = Holder { attempt: "f0".repeat(16), kind: "install".into(), pid, since };
            let _held = Admission::try_take(&host, holder).unwrap();
            say(&"holds".into());
            park();
        }
        Role::Mutation => {
            let _held = MutationAdmission::try_take(&host).unwrap();
            say(&"holds".into());
            park();
        }
    }
}

fn installs(host: &Host, root: &Path, version: &str, at: At) {
    let interrupt = Interrupt::hold().unwrap();
    let mut events = 0;
    let ended = install(host, &exact(version), &interrupt, &mut |event| {
        if matches!(event.what, What::Outcome { .. }) {
            return Ok(());
        }
        let parks = at == At::Park(events);
        if parks || at == At::Say {
            say(&serde_json::to_value(event).unwrap());
        }
        if parks {
            park();
        }
        events += 1;
        Ok(())
    });
    say(&match ended {
        Ok(record) => {
            let mut record = serde_json::to_value(record).unwrap();
            record["left over"] = serde_json::to_value(left_over(host, root)).unwrap();
            record
        }
        Err(Refusal::Busy(busy)) => serde_json::json!({"busy": busy.what(), "processes": busy.processes}),
        Err(refusal) => refusal.to_string().into(),
    });
}
