//! The world in which the bootstrap is run: a user and mount namespace where an ordinary user is root, an empty
//! `/usr/local`, everything else read-only, a real release source, and exactly the tools that a test grants.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kit::release::{Archive, Published, Release};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

/// Set inside the namespace: the directory that may be written.
const INSIDE: &str = "BOOTSTRAP_WORLD";
const INSTALL: &str = "apt-get install dash busybox-static bash ksh zsh curl wget ca-certificates libdigest-sha-perl openssl shellcheck";
/// Where the bootstrap stages.
pub(crate) const BASE: &str = "/usr/local/lib/ployz/bootstrap";
/// What the bootstrap may call; a test takes away, or puts something else in the place.
const TOOLS: &[&str] = &[
    "awk",
    "chmod",
    "curl",
    "df",
    "env",
    "find",
    "grep",
    "gzip",
    "id",
    "mkdir",
    "mktemp",
    "printf",
    "readlink",
    "rm",
    "sh",
    "sha256sum",
    "tail",
    "tar",
    "timeout",
    "tr",
    "uname",
    "wc",
    "wget",
];
/// Stands for ployzd: notes what it was given, and leaves with the status that the test asked for.
const PAYLOAD: &str = r#"#!/bin/sh
printf '%s\0' "$0" "$@" >"$HOME/argv"
/bin/cat >"$HOME/stdin"
/bin/ls -lnA "${0%/*}" >"$HOME/listing"
/usr/bin/stat -c %a "${0%/*}" >"$HOME/mode"
umask >"$HOME/umask"
echo 'ployzd was here'
[ ! -e "$HOME/script" ] || . "$HOME/script"
exit "$(/bin/cat "$HOME/exit")"
"#;

/// A shell that reads the script.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shell {
    pub(crate) name: &'static str,
    program: &'static str,
    arg0: &'static str,
    args: &'static [&'static str],
}

pub(crate) const DASH: Shell = Shell { name: "dash", program: "dash", arg0: "dash", args: &[] };
/// Each as itself, and those that change their ways when they are called `sh` as that too.
pub(crate) const SHELLS: [Shell; 7] = [
    DASH,
    Shell { name: "busybox sh", program: "busybox", arg0: "busybox", args: &["sh"] },
    Shell { name: "bash", program: "bash", arg0: "bash", args: &[] },
    Shell { name: "bash as sh", program: "bash", arg0: "sh", args: &[] },
    Shell { name: "ksh", program: "ksh", arg0: "ksh", args: &[] },
    Shell { name: "zsh", program: "zsh", arg0: "zsh", args: &[] },
    Shell { name: "zsh as sh", program: "zsh", arg0: "sh", args: &[] },
];

impl Shell {
    /// The command that starts it, without a script.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(real(self.program));
        command.arg0(self.arg0).args(self.args);
        command
    }
}

/// `bootstrap/machine.sh`.
pub(crate) fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("bootstrap/machine.sh")
}

/// The tool of this host, or an end of the test that says what to type.
pub(crate) fn real(tool: &str) -> PathBuf {
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        .iter()
        .map(|directory| Path::new(directory).join(tool))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{tool} is not installed; type: {INSTALL}"))
}

/// Where a test is, with a release 1.4.0 of both channels to be had.
pub(crate) struct World {
    pub(crate) directory: PathBuf,
    pub(crate) server: kit::Server,
    runs: AtomicUsize,
}

/// Runs the test that this is called from in a world of its own: `None` outside, once it has succeeded inside.
macro_rules! enter {
    () => {{
        fn here() {}
        crate::world::World::enter(std::any::type_name_of_val(&here))
    }};
}
pub(crate) use enter;

impl World {
    pub(crate) fn enter(here: &str) -> Option<Self> {
        let test = here.trim_end_matches("::here").split_once("::").unwrap().1;
        match std::env::var_os(INSIDE) {
            Some(directory) => Some(Self::prepare(directory.into())),
            None => {
                run_inside(test);
                None
            }
        }
    }

    fn prepare(directory: PathBuf) -> Self {
        let here = directory.as_os_str();
        let tmpfs = |at: &str| mount(&["-t", "tmpfs", "-o", "mode=755", "tmpfs", at]);
        mount(&[OsStr::new("--bind"), here, here]);
        tmpfs("/usr/local");
        tmpfs("/run");
        mount(&["-o", "remount,bind,ro", "/"]);
        fs::create_dir_all("/run/systemd/system").unwrap();
        for directory in ["bin", "home", "site", "cwd"].map(|name| directory.join(name)) {
            fs::create_dir(directory).unwrap();
        }
        let server = kit::Server::start(kit::Options::new(directory.join("site"))).unwrap();
        let world = Self { directory, server, runs: AtomicUsize::new(0) };
        for tool in TOOLS {
            world.grant(tool, tool);
        }
        let ca = world.directory.join("ca.pem");
        world.server.write_ca(&ca).unwrap();
        fs::write(world.home(".wgetrc"), format!("ca_certificate = {}\n", ca.display())).unwrap();
        fs::write(world.home("exit"), "0").unwrap();
        world.publish("1.4.0");
        world.publish("1.5.0-beta.2");
        world
    }

    /// Publishes a release whose ployzd is the stand-in; its channel points to it.
    pub(crate) fn publish(&self, version: &str) {
        let archive = Archive::new().file("LICENSE", "free").file("ployzd", PAYLOAD);
        self.publish_archive(version, archive);
    }

    pub(crate) fn publish_archive(&self, version: &str, archive: impl Into<Vec<u8>>) -> Published {
        Release::new(version).archive(archive).publish(&self.directory.join("site")).unwrap()
    }

    pub(crate) fn home(&self, name: &str) -> PathBuf {
        self.directory.join("home").join(name)
    }

    /// Lets the bootstrap call `name`, which is `tool` of this host.
    pub(crate) fn grant(&self, name: &str, tool: &str) {
        self.take_away(name);
        symlink(real(tool), self.bin(name)).unwrap();
    }

    /// Lets the bootstrap call `name`, which is this shell script.
    pub(crate) fn pretend(&self, name: &str, text: &str) {
        self.take_away(name);
        fs::write(self.bin(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(self.bin(name), PermissionsExt::from_mode(0o755)).unwrap();
    }

    pub(crate) fn take_away(&self, name: &str) {
        let _ = fs::remove_file(self.bin(name));
    }

    pub(crate) fn bin(&self, name: &str) -> PathBuf {
        self.directory.join("bin").join(name)
    }

    /// A directory that belongs to somebody else.
    pub(crate) fn foreign(&self) -> PathBuf {
        let prepared = self.directory.join("foreign");
        if prepared.exists() { prepared } else { "/etc".into() }
    }

    /// What lies in staging.
    pub(crate) fn staged(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(BASE) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    /// What ployzd was called with since this was last asked: its path, then its arguments.
    pub(crate) fn called(&self) -> Option<Vec<String>> {
        let text = fs::read_to_string(self.home("argv")).ok()?;
        fs::remove_file(self.home("argv")).unwrap();
        Some(text.split_terminator('\0').map(str::to_owned).collect())
    }

    /// A run of the bootstrap by dash from a pipe, which a test varies.
    pub(crate) fn run<'a>(&'a self, args: &'a [&'a str]) -> Run<'a> {
        let url = self.server.url();
        let env = vec![
            ("PLOYZ_RELEASES", format!("{url}/releases/download")),
            ("PLOYZ_CHANNELS", url),
            ("CURL_CA_BUNDLE", self.directory.join("ca.pem").display().to_string()),
        ];
        Run { world: self, shell: DASH, file: None, args, env, ordinary: false }
    }
}

/// A run in the making.
#[derive(Clone)]
pub(crate) struct Run<'a> {
    world: &'a World,
    shell: Shell,
    file: Option<PathBuf>,
    args: &'a [&'a str],
    env: Vec<(&'static str, String)>,
    ordinary: bool,
}

impl Run<'_> {
    pub(crate) fn shell(self, shell: Shell) -> Self {
        Self { shell, ..self }
    }
    /// From a file instead of a pipe.
    pub(crate) fn file(self, file: impl Into<PathBuf>) -> Self {
        Self { file: Some(file.into()), ..self }
    }
    /// Another environment variable; an empty value is as good as none.
    pub(crate) fn env(mut self, name: &'static str, value: &str) -> Self {
        self.env.retain(|(known, _)| *known != name);
        self.env.push((name, value.to_owned()));
        self
    }
    /// As a user who is not root.
    pub(crate) fn ordinary_user(self) -> Self {
        Self { ordinary: true, ..self }
    }

    /// The command, in an environment of its own; its output is still the test's.
    pub(crate) fn command(&self) -> Command {
        let mut command = self.shell.command();
        if self.ordinary {
            command = Command::new(real("unshare"));
            command.args(["-U", "--map-user=1000", "--map-group=1000"]);
            self.world.grant(self.shell.program, self.shell.program);
            command.arg(self.shell.program).args(self.shell.args);
        }
        match &self.file {
            Some(file) => command.arg(file).args(self.args),
            None => command.args(["-s", "--"]).args(self.args),
        };
        command
            .env_clear()
            .env("PATH", self.world.directory.join("bin"))
            .env("HOME", self.world.directory.join("home"))
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .current_dir(self.world.directory.join("cwd"))
            .process_group(0);
        command
    }

    pub(crate) fn start(&self) -> Running {
        let number = self.world.runs.fetch_add(1, Ordering::Relaxed);
        let output = |name| self.world.directory.join(format!("{number}.{name}"));
        let mut child = self
            .command()
            .stdin(if self.file.is_some() { Stdio::null() } else { Stdio::piped() })
            .stdout(File::create(output("out")).unwrap())
            .stderr(File::create(output("err")).unwrap())
            .spawn()
            .unwrap();
        if let Some(mut pipe) = child.stdin.take() {
            // A shell that refuses at once may not read to the end.
            let _ = pipe.write_all(&fs::read(script()).unwrap());
        }
        Running { child, out: output("out"), err: output("err") }
    }

    pub(crate) fn end(&self) -> Ended {
        self.start().end()
    }

    /// Runs it and expects it to refuse with this code and these words, having run and left nothing.
    pub(crate) fn refused(&self, code: i32, words: &str) -> Ended {
        let ended = self.end();
        assert_eq!(ended.code, code, "{ended:?}");
        assert!(ended.err.contains(words), "expected {words:?}: {ended:?}");
        assert_eq!(self.world.called(), None, "ployzd ran: {ended:?}");
        assert_eq!(self.world.staged(), Vec::<PathBuf>::new(), "{ended:?}");
        ended
    }
}

/// A run that goes on.
pub(crate) struct Running {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

/// How a run ended; the code is 128 + N after a signal, as a shell counts.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Running {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().try_into().unwrap())
    }
    /// To the shell alone.
    pub(crate) fn signal(&self, signal: Signal) {
        signal::kill(self.pid(), signal).unwrap();
    }
    /// To all in the foreground, as a terminal does.
    pub(crate) fn signal_all(&self, signal: Signal) {
        signal::killpg(self.pid(), signal).unwrap();
    }

    pub(crate) fn end(mut self) -> Ended {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > Duration::from_secs(60) {
                self.signal_all(Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        Ended {
            code: status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap(),
            out: String::from_utf8_lossy(&fs::read(&self.out).unwrap()).into_owned(),
            err: String::from_utf8_lossy(&fs::read(&self.err).unwrap()).into_owned(),
        }
    }
}

/// Waits for something that must come.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn mount(args: &[impl AsRef<OsStr>]) {
    let output = Command::new(real("mount")).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn run_inside(test: &str) {
    let directory = tempfile::tempdir().unwrap();
    if fs::metadata(directory.path()).unwrap().uid() == 0 {
        // Inside, one user is mapped: only out here can root give something to another.
        fs::create_dir(directory.path().join("foreign")).unwrap();
        chown(directory.path().join("foreign"), Some(65534), None).unwrap();
    }
    let output = Command::new(real("unshare"))
        .args(["--user", "--map-root-user", "--mount"])
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(INSIDE, directory.path())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        !err.contains("unshare: unshare failed") && !err.contains("unshare: write failed"),
        "this host gives ordinary users no user namespace: {err}\
         type: sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0"
    );
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
}
