//! What one task remembers of its tool calls: pure and synchronous.

use crate::{IdempotencyKey, Key, Kind, Safety, Signal, safety::idempotency_key};
use std::collections::{HashMap, HashSet};

/// One call of a tool: of which, and under which key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The tool.
    pub tool: Key,
    /// What makes this call the same one as another.
    pub key: IdempotencyKey,
}

impl Call {
    /// The call of `tool` with these arguments (JSON), made for `token`: see
    /// [`idempotency_key`].
    #[must_use]
    pub fn new(tool: &str, arguments: &str, token: &str) -> Self {
        Call { tool: tool.into(), key: idempotency_key(tool, arguments, token) }
    }
}

/// How much is too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Failures of one tool in a row.
    pub failures: u32,
    /// Calls in all.
    pub calls: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { failures: 5, calls: 1000 }
    }
}

/// Why a call is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum No {
    /// An earlier call of the same key may have taken effect, or still runs.
    InDoubt,
    /// The tool has failed too often in a row.
    Futile,
    /// The task has made too many calls.
    TooMany,
}

impl No {
    /// In words for a log, and for a model.
    #[must_use]
    pub const fn why(self) -> &'static str {
        match self {
            No::InDoubt => {
                "an earlier call of the same tool with the same arguments may have taken effect, or still \
                 runs: look it up, do not call again"
            }
            No::Futile => "this tool has failed too often in a row in this task: do something else, or stop",
            No::TooMany => "this task has made too many tool calls: stop",
        }
    }
}

/// The memory. It grows with the calls that pass, and these are limited.
#[derive(Debug, Default)]
pub struct Memory {
    calls: u32,
    /// Failures in a row.
    failures: HashMap<Key, u32>,
    /// Of calls that must not be made twice: begun, and not known to have done nothing.
    doubt: HashSet<IdempotencyKey>,
}

impl Memory {
    /// Asks for a call.
    ///
    /// # Errors
    ///
    /// Says why it is not to be made. Nothing has changed then.
    pub fn begin(&mut self, limits: &Limits, call: Call, safety: Safety) -> Result<(), No> {
        if safety == Safety::Once && self.doubt.contains(&call.key) {
            return Err(No::InDoubt);
        }
        if self.failures.get(&call.tool).is_some_and(|failures| *failures >= limits.failures) {
            return Err(No::Futile);
        }
        if self.calls >= limits.calls {
            return Err(No::TooMany);
        }
        self.calls += 1;
        // From the start, so that one that is dropped stays in doubt, and one beside it is refused.
        if safety == Safety::Once {
            self.doubt.insert(call.key);
        }
        Ok(())
    }

    /// Takes note of the outcome of a call that was begun.
    pub fn end(&mut self, call: Call, safety: Safety, signal: &Signal) {
        if safety == Safety::Once && !safety.is_in_doubt(signal) {
            self.doubt.remove(&call.key);
        }
        match signal.kind {
            Kind::Refused => {}
            kind if kind.is_success() => drop(self.failures.remove(&call.tool)),
            _ => *self.failures.entry(call.tool).or_default() += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Executed;
    use proptest::prelude::*;

    fn call(tool: &str, arguments: &str) -> Call {
        Call::new(tool, arguments, "step")
    }

    #[test]
    fn what_may_have_happened_is_not_done_again_in_any_spelling() {
        let limits = Limits::default();
        let pay = call("pay", r#"{"a":1,"b":2}"#);
        for (signal, again) in [
            (Signal::new(Kind::Failed), Err(No::InDoubt)),
            (Signal::new(Kind::Overloaded), Err(No::InDoubt)),
            (Signal::new(Kind::Failed).with_executed(Executed::No), Ok(())),
            (Signal::new(Kind::Success), Ok(())),
            (Signal::new(Kind::Throttled), Ok(())),
            (Signal::new(Kind::Rejected), Ok(())),
            (Signal::new(Kind::Refused), Ok(())),
        ] {
            let mut memory = Memory::default();
            assert_eq!(memory.begin(&limits, pay, Safety::Once), Ok(()));
            assert_eq!(memory.begin(&limits, pay, Safety::Once), Err(No::InDoubt), "it runs");
            memory.end(pay, Safety::Once, &signal);
            let same = call("pay", r#"{ "b": 2.0, "a": 1 }"#);
            assert_eq!(memory.begin(&limits, same, Safety::Once), again, "{signal:?}");
            assert_eq!(memory.begin(&limits, call("pay", r#"{"a":2}"#), Safety::Once), Ok(()));
        }
        for safety in [Safety::Safe, Safety::Costly, Safety::Keyed] {
            let mut memory = Memory::default();
            for _ in 0..4 {
                assert_eq!(memory.begin(&limits, pay, safety), Ok(()));
                memory.end(pay, safety, &Signal::new(Kind::Failed));
            }
        }
    }

    #[test]
    fn futile_and_too_many() {
        let limits = Limits { failures: 2, calls: 6 };
        let mut memory = Memory::default();
        let mut run = |tool: &str, arguments: &str, kind| {
            let call = call(tool, arguments);
            memory.begin(&limits, call, Safety::Safe)?;
            memory.end(call, Safety::Safe, &Signal::new(kind));
            Ok(())
        };
        assert_eq!(run("a", "1", Kind::Rejected), Ok(()));
        assert_eq!(run("a", "2", Kind::Success), Ok(()), "starts again");
        assert_eq!(run("a", "3", Kind::Failed), Ok(()));
        assert_eq!(run("a", "4", Kind::Throttled), Ok(()));
        assert_eq!(run("a", "5", Kind::Success), Err(No::Futile), "whatever the arguments");
        assert_eq!(run("b", "5", Kind::Refused), Ok(()), "another tool");
        assert_eq!(run("b", "5", Kind::Empty), Ok(()));
        assert_eq!(run("b", "5", Kind::Success), Err(No::TooMany));
    }

    proptest! {
        #[test]
        fn the_laws_hold_over_any_task(
            steps in prop::collection::vec((0..3_u8, 0..3_u8, 0..4_usize, 0..9_usize, any::<bool>()), 0..80),
            (failures, calls) in (1..5_u32, 1..60_u32),
        ) {
            const KINDS: [Kind; 9] = [Kind::Success, Kind::Empty, Kind::Throttled, Kind::Overloaded, Kind::Failed,
                Kind::Depleted, Kind::Misconfigured, Kind::Rejected, Kind::Refused];
            const ALL: [Safety; 4] = [Safety::Safe, Safety::Costly, Safety::Keyed, Safety::Once];
            let limits = Limits { failures, calls };
            let mut memory = Memory::default();
            let mut passed = 0;
            let mut maybe_done = HashSet::new();
            for (tool, arguments, safety, kind, dropped) in steps {
                let (call, safety) = (call(&tool.to_string(), &arguments.to_string()), ALL[safety]);
                if memory.begin(&limits, call, safety).is_err() {
                    continue;
                }
                passed += 1;
                // Law 4: a write that may have been done is not begun again.
                prop_assert!(safety != Safety::Once || !maybe_done.contains(&call.key));
                let signal = Signal::new(KINDS[kind]);
                if dropped {
                    if safety == Safety::Once { maybe_done.insert(call.key); }
                    continue;
                }
                memory.end(call, safety, &signal);
                match (safety, signal.executed) {
                    (Safety::Once, Executed::Maybe) => { maybe_done.insert(call.key); }
                    (Safety::Once, _) => { maybe_done.remove(&call.key); }
                    _ => {}
                }
            }
            prop_assert!(passed <= calls && memory.doubt.len() <= passed as usize);
        }
    }
}
