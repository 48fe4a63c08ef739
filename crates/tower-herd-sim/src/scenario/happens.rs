//! What happens to the processes of a fleet and to its store, in one line of text.

use std::time::Duration;

use super::settings::SettingsError;
use super::value::{bad, seconds, whole};
use crate::store::StoreFault;

/// One trouble of a fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Happens {
    /// What.
    pub what: Trouble,
    /// To which process; of no meaning where it happens to the store.
    pub process: u32,
    /// When it begins.
    pub at: Duration,
    /// When it is over.
    pub to: Duration,
}

/// What may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A process is killed (SIGKILL): its calls end at the provider, and it says goodbye to nobody.
    Kill,
    /// A process stands still (SIGSTOP), and goes on later. Its calls in flight go on at the provider.
    Stop,
    /// A process is cut off from the store, not from the provider.
    Cut,
    /// A process does not hear of the store, which hears of it.
    Deaf,
    /// The provider refuses the calls of a process, with the hint of the settings.
    Refuse,
    /// The store refuses connections.
    Down,
    /// The store does not answer.
    Silent,
    /// The store stands still.
    Frozen,
    /// The store loses all data.
    Flush,
}

const NAMES: [(&str, Trouble); 9] = [
    ("kill", Trouble::Kill),
    ("stop", Trouble::Stop),
    ("cut", Trouble::Cut),
    ("deaf", Trouble::Deaf),
    ("refuse", Trouble::Refuse),
    ("down", Trouble::Down),
    ("silent", Trouble::Silent),
    ("frozen", Trouble::Frozen),
    ("flush", Trouble::Flush),
];

impl Trouble {
    fn has_process(self) -> bool {
        matches!(self, Self::Kill | Self::Stop | Self::Cut | Self::Deaf | Self::Refuse)
    }

    fn lasts(self) -> bool {
        !matches!(self, Self::Kill | Self::Flush)
    }
}

impl Happens {
    /// Reads `kill@60:3`, `stop@90:1+15` or `flush@200`: what, `@` when, `:` to which process, `+` how long.
    pub(super) fn parse(key: &str, text: &str) -> Result<Self, SettingsError> {
        let wrong =
            || bad(key, text, "none, or WHAT@AT[:PROCESS][+SECONDS], ... (kill@60:3,stop@90:1+15,flush@200)");
        let (name, rest) = text.trim().split_once('@').ok_or_else(wrong)?;
        let what = NAMES.iter().find(|(known, _)| *known == name).ok_or_else(wrong)?.1;
        let (rest, length) = match rest.split_once('+') {
            Some((rest, length)) => (rest, Some(seconds(key, length, 0.0, 86_400.0)?)),
            None => (rest, None),
        };
        let (at, process) = match rest.split_once(':') {
            Some((at, process)) => (at, Some(whole(key, process, 0, 100_000)? as u32)),
            None => (rest, None),
        };
        if what.has_process() != process.is_some() || what.lasts() != length.is_some() {
            return Err(wrong());
        }
        let at = seconds(key, at, 0.0, 86_400.0)?;
        let to = length.map_or(Duration::MAX, |length| at + length);
        Ok(Self { what, process: process.unwrap_or_default(), at, to })
    }

    /// What it is to the store.
    pub(super) fn store_fault(&self) -> Option<StoreFault> {
        let Self { what, process, at: from, to } = *self;
        Some(match what {
            Trouble::Kill | Trouble::Cut => StoreFault::CutOff { process, from, to },
            Trouble::Stop => StoreFault::Held { process, from, to },
            Trouble::Deaf => StoreFault::Deaf { process, from, to },
            Trouble::Down => StoreFault::Down { from, to },
            Trouble::Silent => StoreFault::Silent { from, to },
            Trouble::Frozen => StoreFault::Stopped { from, to },
            Trouble::Flush => StoreFault::Flushed { at: from },
            Trouble::Refuse => return None,
        })
    }
}
