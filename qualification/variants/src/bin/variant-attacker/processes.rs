//! Getting at other processes, and staying when one's own should end.

use std::fs::{self, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::{Pid, getppid, setsid};

use crate::Report;

/// How long what stays behind would stay.
const LONG: Duration = Duration::from_secs(600);

type Tries = Vec<(&'static str, Result<(), String>)>;

/// Everything that opens a process to another one.
fn tries(pid: Pid) -> Tries {
    let io = |result: io::Result<()>| result.map_err(|e| errno(&e));
    let nix = |result: nix::Result<()>| result.map_err(|e| format!("{e:?}"));
    let path = |name: &str| format!("/proc/{pid}/{name}");
    let remote = [RemoteIoVec { base: 0x40_0000, len: 8 }];
    let read = |name: &str| io(fs::File::open(path(name)).and_then(|mut f| f.read(&mut [0; 8])).map(drop));
    let mut found: Tries = vec![
        ("read mem", io(fs::File::open(path("mem")).map(drop))),
        ("write mem", io(OpenOptions::new().write(true).open(path("mem")).map(drop))),
        ("read maps", read("maps")),
        ("read environ", read("environ")),
        ("read auxv", read("auxv")),
        ("read stack", read("stack")),
        ("read syscall", read("syscall")),
        ("read io", read("io")),
        ("write oom_score_adj", io(write(&path("oom_score_adj")))),
        ("write coredump_filter", io(write(&path("coredump_filter")))),
        ("list fd", io(fs::read_dir(path("fd")).map(drop))),
        ("open fd/0", io(fs::File::open(path("fd/0")).map(drop))),
        ("open fd/1", io(OpenOptions::new().write(true).open(path("fd/1")).map(drop))),
        ("follow exe", io(fs::read_link(path("exe")).map(drop))),
        ("follow root", io(fs::read_link(path("root")).map(drop))),
        (
            "process_vm_readv",
            nix(process_vm_readv(pid, &mut [IoSliceMut::new(&mut [0; 8])], &remote).map(drop)),
        ),
        ("process_vm_writev", nix(process_vm_writev(pid, &[IoSlice::new(&[0; 8])], &remote).map(drop))),
        ("ptrace seize", nix(ptrace::seize(pid, ptrace::Options::empty()))),
        ("ptrace attach", nix(ptrace::attach(pid))),
        ("signal", nix(kill(pid, None))),
    ];
    // What may be signalled is left running: that it may be is all there is to know.
    if found.last().is_some_and(|(_, tried)| tried.is_err()) {
        found.push(("SIGTERM", nix(kill(pid, Signal::SIGTERM))));
        found.push(("SIGKILL", nix(kill(pid, Signal::SIGKILL))));
    }
    found
}

fn write(path: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(b"0")
}

fn errno(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |code| format!("{:?}", nix::Error::from_raw(code)))
}

/// Tries all of it, and says how each ended.
pub(crate) fn on(pid: &str) -> ExitCode {
    let Ok(pid) = pid.parse() else { return ExitCode::from(2) };
    for (what, tried) in tries(Pid::from_raw(pid)) {
        println!("{what}: {}", tried.err().unwrap_or_else(|| "worked".into()));
    }
    ExitCode::SUCCESS
}

/// The parent, PID 1 and whatever else runs, and descriptors that others may have left open.
pub(crate) fn reach_out(report: &mut Report) {
    for (name, pid) in [("the parent", getppid()), ("PID 1", Pid::from_raw(1))] {
        for (what, tried) in tries(pid) {
            report.note(&format!("{name}: {what}"), tried.map(|()| String::new()));
        }
    }
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if pid.unsigned_abs() != std::process::id() {
            report.note(&format!("signalled {pid}"), kill(Pid::from_raw(pid), None).map(|()| String::new()));
        }
    }
    let own = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let open: Vec<_> = own
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, fs::read_link(entry.path()).ok()?)))
        .collect();
    for (number, target) in open {
        // Its own three are pipes; the one that lists is that of the list.
        let target = target.display().to_string();
        let expected = matches!(number.as_str(), "0" | "1" | "2") && target.starts_with("pipe:");
        let listing = target == format!("/proc/{}/fd", std::process::id());
        if !expected && !listing {
            report.worked.push(format!("inherited descriptor {number} to {target}"));
        }
        report.tried += 1;
    }
}

/// Leaves a process behind, twice removed, in a session of its own. That this works is no news: what matters is that
/// it is gone afterwards.
pub(crate) fn stay_behind(report: &mut Report) {
    report.tried += 1;
    if start("first").is_err() {
        report.worked.push("could leave nothing behind, so that nothing was shown of it".into());
    }
}

/// One of the two generations.
pub(crate) fn linger(generation: &str) -> ExitCode {
    let _ = setsid();
    if generation == "first" {
        return start("second").map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    std::thread::sleep(LONG);
    ExitCode::SUCCESS
}

fn start(generation: &str) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["linger", generation]).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    if generation == "first" { child.wait().map(drop) } else { Ok(()) }
}
