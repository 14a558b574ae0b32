//! The table of rules that a server applies: ordered, counted, changeable while it runs.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::head::Head;
use crate::rule::{Accept, Rule};

/// The rules of one server.
#[derive(Debug, Default)]
pub(crate) struct Rules(Mutex<Vec<Entry>>);

#[derive(Debug)]
struct Entry {
    rule: Rule,
    /// How many requests matched, whether or not the rule was applied to them.
    seen: u64,
}

impl Rules {
    /// Adds a rule behind those that are there.
    pub(crate) fn add(&self, rule: Rule) {
        self.lock().push(Entry { rule, seen: 0 });
    }

    /// Puts these in the place of all.
    pub(crate) fn replace(&self, rules: Vec<Rule>) {
        *self.lock() = rules.into_iter().map(|rule| Entry { rule, seen: 0 }).collect();
    }

    /// What the table holds, each with the number of requests that it was applied to.
    pub(crate) fn list(&self) -> Vec<(Rule, u64)> {
        self.lock().iter().map(|entry| (entry.rule.clone(), entry.applied())).collect()
    }

    /// The rule for this request, counted as used.
    pub(crate) fn for_request(&self, head: &Head) -> Option<Rule> {
        self.first(|rule| rule.matches(&head.method, &head.path, head.query.as_deref()))
    }

    /// The rule for a new connection, counted as used.
    pub(crate) fn for_connection(&self) -> Option<(Rule, Accept)> {
        let rule = self.first(|rule| rule.accept.is_some())?;
        let accept = rule.accept?;
        Some((rule, accept))
    }

    fn first(&self, matches: impl Fn(&Rule) -> bool) -> Option<Rule> {
        for entry in self.lock().iter_mut().filter(|entry| matches(&entry.rule)) {
            if entry.used_up() {
                continue;
            }
            entry.seen += 1;
            if entry.seen > entry.rule.after {
                return Some(entry.rule.clone());
            }
        }
        None
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn applied(&self) -> u64 {
        self.seen.saturating_sub(self.rule.after)
    }

    fn used_up(&self) -> bool {
        self.rule.times.is_some_and(|times| self.applied() >= times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_apply_in_order_and_are_used_up() {
        let rules = Rules::default();
        rules.add(Rule::new("/a").times(2).status(503));
        rules.add(Rule::new("/*").after(1).times(1).status(404));
        let asked = |path: &str| rules.for_request(&Head::get(path)).and_then(|rule| rule.status);
        assert_eq!(asked("/a"), Some(503));
        assert_eq!(asked("/b"), None, "one passes");
        assert_eq!(asked("/a"), Some(503));
        assert_eq!(asked("/a"), Some(404), "the first is used up");
        assert_eq!(asked("/a"), None);
        assert_eq!(rules.list().iter().map(|(_, applied)| *applied).collect::<Vec<_>>(), [2, 1]);
        assert!(rules.for_connection().is_none());
        rules.replace(vec![Rule::at_accept(Accept::Reset).times(1)]);
        assert!(rules.for_connection().is_some());
        assert!(rules.for_connection().is_none());
    }
}
