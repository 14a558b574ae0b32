//! The one way to run another program: a deadline, a cleared environment, bounded output, its stderr's tail in the
//! error, and nothing that it started left behind.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::host::Account;
use crate::interrupt::Interrupt;
use crate::text::printable;

/// Where programs of the host are looked for.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How much of stderr is kept: its tail.
const STDERR_TAIL: usize = 4096;

/// A program to run.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    program: OsString,
    arguments: Vec<OsString>,
    account: Option<Account>,
    input: &'a [u8],
    environment: Vec<(&'static str, String)>,
    deadline: Duration,
    most_output: usize,
    interrupt: Option<&'a Interrupt>,
    contained: bool,
}

/// How a program ended, when it ended by itself.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Its status.
    pub(crate) status: ExitStatus,
    /// What it wrote to stdout, where it was collected.
    pub(crate) stdout: Vec<u8>,
    /// The tail of what it wrote to stderr.
    pub(crate) stderr: String,
}

/// Why a program did not do what it was run for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// It could not be started.
    #[error("starting {program}: {source}")]
    Start { program: String, source: io::Error },
    /// It did not end in time and was killed.
    #[error("{program} did not end within {seconds} s and was killed{}", said(.stderr))]
    Deadline { program: String, seconds: u64, stderr: String },
    /// It wrote more than it may and was killed.
    #[error("{program} wrote more than {most} bytes and was killed")]
    Output { program: String, most: usize },
    /// It ended with another status than 0.
    #[error("{program} {}{}", how(.status), said(.stderr))]
    Status { program: String, status: ExitStatus, stderr: String },
    /// Its output could not be read or taken.
    #[error("reading from {program}: {source}")]
    Stream { program: String, source: io::Error },
    /// A signal asked this process to end.
    #[error("cancelled by {signal}")]
    Cancelled { signal: &'static str },
}

fn said(stderr: &str) -> String {
    match printable(stderr).as_str() {
        "" => String::new(),
        text => format!("; it said: {text}"),
    }
}

/// "exited with status 42", "was killed by SIGSEGV".
pub(crate) fn how(status: &ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(number)) => match Signal::try_from(number) {
            Ok(signal) => format!("was killed by {signal}"),
            Err(_) => format!("was killed by signal {number}"),
        },
        (None, None) => "ended in an unknown way".into(),
    }
}

impl<'a> Run<'a> {
    /// A program with its deadline. Its environment is empty but for `PATH` and `LC_ALL=C.UTF-8`.
    pub(crate) fn new(program: impl AsRef<OsStr>, deadline: Duration) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            arguments: Vec::new(),
            account: None,
            input: &[],
            environment: Vec::new(),
            deadline,
            most_output: 64 * 1024,
            interrupt: None,
            contained: false,
        }
    }

    /// Its arguments.
    pub(crate) fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// With a variable in its environment.
    pub(crate) fn env(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.to_owned()));
        self
    }

    /// Runs it as another account, set at spawn: supplementary groups and capabilities are cleared with it.
    pub(crate) fn account(mut self, account: Option<Account>) -> Self {
        self.account = account;
        self
    }

    /// Does not trust it: everything that it started is ended with it, even what left its process group.
    pub(crate) fn contained(mut self) -> Self {
        self.contained = true;
        self
    }

    /// What it reads from stdin.
    pub(crate) fn input(mut self, input: &'a [u8]) -> Self {
        self.input = input;
        self
    }

    /// How many bytes it may write to stdout.
    pub(crate) fn most_output(mut self, bytes: usize) -> Self {
        self.most_output = bytes;
        self
    }

    /// Ends it when a signal asks this process to end.
    pub(crate) fn interrupt(mut self, interrupt: &'a Interrupt) -> Self {
        self.interrupt = Some(interrupt);
        self
    }

    /// Runs it to its end, whatever its status.
    pub(crate) fn run(self) -> Result<Ended, CommandError> {
        let mut stdout = Vec::new();
        let most = self.most_output;
        let name = self.name();
        let mut overrun = false;
        let ended = self.stream(None, &mut |bytes| {
            overrun = stdout.len() + bytes.len() > most;
            if overrun {
                return Err(io::Error::other("too much output"));
            }
            stdout.extend_from_slice(bytes);
            Ok(())
        });
        match ended {
            Err(CommandError::Stream { .. }) if overrun => Err(CommandError::Output { program: name, most }),
            ended => Ok(Ended { stdout, ..ended? }),
        }
    }

    /// Runs it to its end; another status than 0 is an error.
    pub(crate) fn check(self) -> Result<Ended, CommandError> {
        let program = self.name();
        let ended = self.run()?;
        if ended.status.success() {
            return Ok(ended);
        }
        Err(CommandError::Status { program, status: ended.status, stderr: ended.stderr })
    }

    /// Runs it to its end and gives what it writes to `sink` as it comes. `stall` ends it when nothing came for
    /// that long. The output's bounds are the sink's.
    pub(crate) fn stream(
        self,
        stall: Option<Duration>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<Ended, CommandError> {
        let program = self.name();
        if self.contained {
            // Whatever the child leaves behind becomes ours to end.
            let _ = nix::sys::prctl::set_child_subreaper(true);
        }
        // What this process had before (of the shell that it was before an exec, say) is none of ours.
        let others = if self.contained { children() } else { Vec::new() };
        let mut child =
            self.start().map_err(|source| CommandError::Start { program: program.clone(), source })?;
        let result = self.follow(&mut child, stall, sink, &program);
        end(&mut child, self.contained.then_some(others.as_slice()));
        let (status, stderr) = result?;
        Ok(Ended { status, stdout: Vec::new(), stderr })
    }

    fn name(&self) -> String {
        let verb = self.arguments.first().map(|a| format!(" {}", a.to_string_lossy())).unwrap_or_default();
        format!("{}{verb}", self.program.to_string_lossy())
    }

    fn start(&self) -> io::Result<Child> {
        let mut command = std::process::Command::new(&self.program);
        command.args(&self.arguments).env_clear().env("PATH", PATH).env("LC_ALL", "C.UTF-8");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // Pipes only: an image that is being built may have no /dev/null.
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .current_dir("/")
            .process_group(0);
        if let Some(account) = self.account {
            command.uid(account.uid).gid(account.gid);
        }
        let mut known = started();
        let child = command.spawn()?;
        known.push(child.id());
        Ok(child)
    }

    fn follow(
        &self,
        child: &mut Child,
        stall: Option<Duration>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
        program: &str,
    ) -> Result<(ExitStatus, String), CommandError> {
        let stream = |source: io::Error| CommandError::Stream { program: program.to_owned(), source };
        let (mut stdin, mut stdout, mut stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        for fd in [fd(&stdin), fd(&stdout), fd(&stderr)].into_iter().flatten() {
            fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|e| stream(e.into()))?;
        }
        let mut unsent = self.input;
        let (started, mut heard) = (Instant::now(), Instant::now());
        let mut buffer = vec![0u8; 64 * 1024];
        let mut tail = Vec::new();
        loop {
            let late = started.elapsed() >= self.deadline || stall.is_some_and(|s| heard.elapsed() >= s);
            if late {
                let seconds = stall.unwrap_or(self.deadline).min(self.deadline).as_secs();
                let stderr = String::from_utf8_lossy(&tail).into_owned();
                return Err(CommandError::Deadline { program: program.to_owned(), seconds, stderr });
            }
            if let Some(signal) = self.interrupt.and_then(Interrupt::requested) {
                return Err(CommandError::Cancelled { signal });
            }
            give(&mut stdin, &mut unsent);
            // An exited child may leave its pipes open in others' hands: what is there is read, then that is all.
            let exited = child.try_wait().map_err(stream)?;
            if take(&mut stdout, &mut buffer, sink).map_err(stream)? {
                heard = Instant::now();
                continue;
            }
            let mut keep = |bytes: &[u8]| {
                tail.extend_from_slice(bytes);
                let excess = tail.len().saturating_sub(STDERR_TAIL);
                tail.drain(..excess);
                Ok(())
            };
            if take(&mut stderr, &mut buffer, &mut keep).map_err(stream)? {
                continue;
            }
            if let Some(status) = exited {
                return Ok((status, String::from_utf8_lossy(&tail).into_owned()));
            }
            wait(fd(&stdin), [fd(&stdout), fd(&stderr)], self.interrupt);
        }
    }
}

/// Reads once; says whether something came. The end of the stream closes it.
fn take<R: Read>(
    from: &mut Option<R>,
    buffer: &mut [u8],
    sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<bool> {
    let Some(reader) = from else { return Ok(false) };
    match reader.read(buffer) {
        Ok(0) => {
            *from = None;
            Ok(true)
        }
        Ok(n) => sink(&buffer[..n]).map(|()| true),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(true),
        Err(e) => Err(e),
    }
}

/// Writes what the child's stdin takes, and closes it after the last byte. A child that does not want it all is no
/// error: its status tells.
fn give(stdin: &mut Option<std::process::ChildStdin>, unsent: &mut &[u8]) {
    while let Some(pipe) = stdin {
        if unsent.is_empty() {
            *stdin = None;
            return;
        }
        match pipe.write(unsent) {
            Ok(n) => *unsent = &unsent[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => *stdin = None,
        }
    }
}

fn fd<T: AsFd>(pipe: &Option<T>) -> Option<BorrowedFd<'_>> {
    pipe.as_ref().map(AsFd::as_fd)
}

/// Waits until there is something to do. The exit of a child shows as its pipes' end; one that leaves them to others,
/// or closed them early, is found by looking again a little later.
fn wait(to: Option<BorrowedFd<'_>>, from: [Option<BorrowedFd<'_>>; 2], interrupt: Option<&Interrupt>) {
    let pipes_open = from.iter().any(Option::is_some);
    let writable = to.map(|fd| PollFd::new(fd, PollFlags::POLLOUT));
    let readable = from.into_iter().flatten().chain(interrupt.map(Interrupt::fd));
    let mut fds: Vec<_> = readable.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).chain(writable).collect();
    let timeout = PollTimeout::from(if pipes_open { 50u8 } else { 1 });
    let _ = poll(&mut fds, timeout);
}

/// The children that [`Run`] has started and not yet ended. Which children a process has is a fact of the whole
/// process, so this is too: it tells a child of another thread from an orphan that was handed to us.
static STARTED: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn started() -> MutexGuard<'static, Vec<u32>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the child and its process group and, for a contained one, every descendant that has come to us as child
/// subreaper: nothing that it started outlives the call that started it. `others` were children before it.
fn end(child: &mut Child, others: Option<&[u32]>) {
    if let Ok(group) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    let _ = child.kill();
    let _ = child.wait();
    started().retain(|pid| *pid != child.id());
    let Some(others) = others else { return };
    // A killed parent hands its children over at once, so a look a generation is enough; the bound is only there
    // against one that forks faster than it is ended.
    for _ in 0..1000 {
        let known = started();
        let orphans: Vec<_> =
            children().into_iter().filter(|pid| !known.contains(pid) && !others.contains(pid)).collect();
        if orphans.is_empty() {
            return;
        }
        for orphan in orphans.into_iter().filter_map(|pid| i32::try_from(pid).ok()).map(Pid::from_raw) {
            let _ = kill(orphan, Signal::SIGKILL);
            while waitpid(orphan, None) == Err(Errno::EINTR) {}
        }
    }
}

/// The processes whose parent is this one.
fn children() -> Vec<u32> {
    let own = std::process::id();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The command's name is in parentheses and may hold anything: the fields start after the last one.
        let parent =
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        if parent == Some(own) {
            found.push(pid);
        }
    }
    found
}
