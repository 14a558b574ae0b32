//! `ployzd doctor`: a line a check, what to type below it.

use serde_json::json;

use super::Exit;
use super::output::{self, Style, error};
use crate::host::Host;
use crate::install::doctor::{self, Checked, Found};
use crate::interrupt::Interrupt;

/// Looks, and says what it saw. 0: clean; 4: a finding; 6: something could not be looked at.
pub(crate) fn run(host: &Host, json: bool) -> Exit {
    let interrupt = match Interrupt::never() {
        Ok(interrupt) => interrupt,
        Err(e) => {
            error(e.to_string(), Some("try again"));
            return Exit::Unknown;
        }
    };
    let mut told = true;
    let checked = doctor::doctor(host, &interrupt, &mut |checked| {
        told &= json || show(checked).is_ok();
    });
    if json {
        let all = json!({"schema": 1, "host": host.name(), "checks": checked});
        told = output::stdout().line(all.to_string()).is_ok();
    }
    let any = |is: fn(&Found) -> bool| checked.iter().any(|checked| is(&checked.found));
    if !told {
        return Exit::Unknown;
    }
    match (any(|f| matches!(f, Found::Finding { .. })), any(|f| matches!(f, Found::Unknown { .. }))) {
        (true, _) => Exit::Unchanged,
        (false, true) => Exit::Unknown,
        (false, false) => Exit::Done,
    }
}

fn show(checked: &Checked) -> std::io::Result<()> {
    let mut out = output::stdout();
    let name = out.styled(Style::Dim, format!("{:<16}", checked.name));
    match &checked.found {
        Found::Ok { seen } => out.line(format!("  ok       {name}{seen}")),
        Found::Unknown { seen } => out.line(format!("  unknown  {name}{seen}")),
        Found::Finding { seen, help } => {
            out.line(format!("  {}  {name}{seen}", out.styled(Style::Red, "FINDING")))?;
            help.iter().try_for_each(|help| out.help(help))
        }
    }
}
