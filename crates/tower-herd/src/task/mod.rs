//! A task: one logical piece of work, and what all its calls, retries and failovers draw on.
//!
//! Three layers of four attempts each are 64 calls, because no layer knows what the others have
//! already spent. A [`Task`] is one handle, shared by all of them: it carries the identity (for
//! hashing and fairness), the deadline that no wait may outlive, and the attempts that are left.
//!
//! On HTTP requests it travels as an extension. [`TaskLayer`], outermost in the stack, starts one
//! where none is; a caller that knows more (which agent asks, how long it can wait) puts its own
//! into the extensions. Requests that are not HTTP implement [`HasTask`]. What is lost without the layer
//! stands at [`TaskLayer`].
//!
//! ```
//! use std::time::Duration;
//! use tower_herd::{Criticality, Safety, Task};
//!
//! let task = Task::new("invoice-4711")
//!     .caller("agent-7")
//!     .deadline_in(Duration::from_secs(20))
//!     .criticality(Criticality::Interactive)
//!     .allowance(2);
//! let mut request = http::Request::post("http://llm.example/v1/chat").body("{}")?;
//! request.extensions_mut().insert(task);
//! request.extensions_mut().insert(Safety::Costly); // a completion: repeatable, at a price
//! # Ok::<(), http::Error>(())
//! ```

mod layer;

pub use layer::{Alike, Describe, StartTask, TaskLayer};

#[cfg(feature = "spend")]
use crate::spend::{Allowance, Amount};
use crate::{Safety, random::mix};
#[cfg(feature = "budget")]
use std::sync::atomic::AtomicU64;
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// The deadline of a task that names none.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);
/// The wire calls a task may fail with when it names no allowance.
pub const DEFAULT_ALLOWANCE: u32 = 3;

/// A task that goes to and fro between rungs is counted once at each, for so many of them.
const POTS: usize = 6;
/// The same for the throttles that refuse it.
#[cfg(feature = "budget")]
const SHEDS: usize = 4;

/// A stable 64-bit key: who or what something is, for hashing and comparing.
///
/// Integers are taken as they are, text by XXH3, which is the same on every machine and in every
/// version of this crate, so that all processes of a fleet send the same task the same way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(u64);

impl Key {
    /// The number behind the key.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}
impl From<u64> for Key {
    fn from(key: u64) -> Self {
        Key(key)
    }
}
impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Key(xxhash_rust::xxh3::xxh3_64(text.as_bytes()))
    }
}
impl From<&[u8]> for Key {
    fn from(bytes: &[u8]) -> Self {
        Key(xxhash_rust::xxh3::xxh3_64(bytes))
    }
}
impl From<String> for Key {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}
impl From<&String> for Key {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Whom a task makes wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Criticality {
    /// A person waits: goes before batch work in every queue.
    #[default]
    Interactive,
    /// Nobody waits: gives way, but never for ever.
    Batch,
}

/// One logical piece of work. A handle: clones are the same task. See the [module](self).
#[derive(Clone)]
pub struct Task(Arc<Inner>);

struct Inner {
    id: Key,
    caller: Option<Key>,
    affinity: Key,
    deadline: Option<Instant>,
    allowance: u32,
    criticality: Criticality,
    /// Calls that others made for it before it came here, where they told.
    before: Option<u32>,
    spent: AtomicU32,
    throttled: AtomicU32,
    /// A layer has given up on a call of it.
    exhausted: AtomicBool,
    /// The retry budgets that it was counted in; what comes after so many is not counted.
    deposited: [AtomicUsize; POTS],
    /// A retry layer has returned its last reply. An error, or a reply of a type of one's own, bears no mark of
    /// that, so the layers further out read it here.
    #[cfg(feature = "jittered-retry")]
    given_up: AtomicBool,
    /// The throttles that refused it, and when it was last counted there.
    #[cfg(feature = "budget")]
    shed: [AtomicU64; SHEDS],
    /// The rung at which its request failed first; 0: none.
    failed_at: AtomicUsize,
    /// Where its last call that was no success went.
    last: Mutex<Last>,
    /// What became of its tool calls.
    #[cfg(feature = "tool-calls")]
    tool_calls: Mutex<crate::tool_calls::state::Memory>,
    #[cfg(feature = "spend")]
    spend: Spend,
}

/// What it may spend. One that was made of another task spends what that one has: money does not start
/// afresh.
#[cfg(feature = "spend")]
#[derive(Default)]
struct Spend {
    /// That of the task that it is a child of.
    parent: Option<Allowance>,
    own: Option<Allowance>,
    /// The task that its line began with; none: itself. The shares are that one's.
    first: Option<Task>,
    /// Its share at each layer that has a limit for it, by the number of the layer.
    shares: Mutex<Vec<(u64, Allowance)>>,
}

#[derive(Clone, Debug, Default)]
struct Last {
    provider: Option<Arc<str>>,
    /// The provider at which a keyed write may have taken effect.
    home: Option<Arc<str>>,
}

impl Task {
    /// A task with this id. Its affinity key is the id, its deadline open (layers then assume
    /// [`DEFAULT_DEADLINE`] from when they first see it), its allowance [`DEFAULT_ALLOWANCE`].
    #[must_use]
    pub fn new(id: impl Into<Key>) -> Self {
        let id = id.into();
        Task(Arc::new(Inner {
            id,
            caller: None,
            affinity: id,
            deadline: None,
            allowance: DEFAULT_ALLOWANCE,
            criticality: Criticality::default(),
            before: None,
            spent: AtomicU32::new(0),
            throttled: AtomicU32::new(0),
            exhausted: AtomicBool::new(false),
            deposited: Default::default(),
            #[cfg(feature = "jittered-retry")]
            given_up: Default::default(),
            #[cfg(feature = "budget")]
            shed: Default::default(),
            failed_at: AtomicUsize::new(0),
            last: Mutex::default(),
            #[cfg(feature = "tool-calls")]
            tool_calls: Mutex::default(),
            #[cfg(feature = "spend")]
            spend: Spend::default(),
        }))
    }

    /// A task that this one starts: of the same caller, with the same deadline and criticality. It has an
    /// attempt allowance of its own, and draws on this one's spend allowance, so that many children spend
    /// no more than their parent may.
    #[must_use]
    pub fn child(&self, id: impl Into<Key>) -> Self {
        Task::new(id).change(|task| {
            task.caller = self.0.caller;
            task.deadline = self.0.deadline;
            task.criticality = self.0.criticality;
            #[cfg(feature = "spend")]
            {
                let own = &self.0.spend.own;
                task.spend = Spend { parent: own.clone(), own: own.clone(), ..self.heir() };
            }
        })
    }

    /// What it may spend, over all its calls, retries, failovers and children: see
    /// [`SpendLayer`](crate::spend). A child spends its parent's, and no more than this of it.
    #[cfg(feature = "spend")]
    #[must_use]
    pub fn spend(self, limit: Amount) -> Self {
        self.change(|task| {
            task.spend.own = Some(match &task.spend.parent {
                Some(parent) => parent.child(limit),
                None => Allowance::new(limit),
            });
        })
    }

    /// The same, out of an allowance that it shares with others: that of a user, or of a day.
    #[cfg(feature = "spend")]
    #[must_use]
    pub fn spend_from(self, allowance: &Allowance) -> Self {
        self.change(|task| task.spend.own = Some(allowance.clone()))
    }

    /// What it may spend, if that is limited.
    #[cfg(feature = "spend")]
    #[must_use]
    pub fn spend_allowance(&self) -> Option<&Allowance> {
        self.0.spend.own.as_ref()
    }

    /// The share at the layer of this number, which is `limit`, of the task and all that come from it.
    #[cfg(feature = "spend")]
    pub(crate) fn spend_share(&self, layer: u64, limit: Amount) -> Allowance {
        let first = self.0.spend.first.as_ref().unwrap_or(self);
        let mut shares = first.0.spend.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, share)) = shares.iter().find(|(number, _)| *number == layer) {
            return share.clone();
        }
        let share = Allowance::new(limit);
        shares.push((layer, share.clone()));
        share
    }

    /// What a task spends that was made of this one.
    #[cfg(feature = "spend")]
    fn heir(&self) -> Spend {
        let Spend { parent, own, first, .. } = &self.0.spend;
        let first = first.clone().unwrap_or_else(|| self.clone());
        Spend { parent: parent.clone(), own: own.clone(), first: Some(first), shares: Mutex::default() }
    }

    /// Another id; the affinity key goes with it if it was the id.
    #[must_use]
    pub fn with_id(self, id: impl Into<Key>) -> Self {
        self.change(|task| {
            let id = id.into();
            if task.affinity == task.id {
                task.affinity = id;
            }
            task.id = id;
        })
    }

    /// The agent it belongs to: queues are fair between callers.
    #[must_use]
    pub fn caller(self, caller: impl Into<Key>) -> Self {
        self.change(|task| task.caller = Some(caller.into()))
    }

    /// What it hashes by among the rungs of a tier, where that is not its id: a conversation, whose
    /// turns should meet the same prompt cache.
    #[must_use]
    pub fn affinity(self, key: impl Into<Key>) -> Self {
        self.change(|task| task.affinity = key.into())
    }

    /// No wait of any layer outlives this instant.
    #[must_use]
    pub fn deadline(self, at: Instant) -> Self {
        self.change(|task| task.deadline = Some(at))
    }

    /// The same, counted from now.
    #[must_use]
    pub fn deadline_in(self, time: Duration) -> Self {
        self.deadline(far(time))
    }

    /// Wire calls that may fail before the task gives up, over all layers and rungs; at least 1.
    #[must_use]
    pub fn allowance(self, attempts: u32) -> Self {
        self.change(|task| task.allowance = attempts.max(1))
    }

    /// Whom it makes wait.
    #[must_use]
    pub fn criticality(self, criticality: Criticality) -> Self {
        self.change(|task| task.criticality = criticality)
    }

    /// Whoever called us has made so many calls for it before this one, and tells us so. From 1 on it is a
    /// repetition: it pays nothing into a retry budget, since the first call has done so.
    ///
    /// [`IncomingAttemptsLayer`](crate::attempts::IncomingAttemptsLayer) reads it from the headers of a
    /// request.
    #[cfg_attr(not(feature = "attempts"), doc(hidden))]
    #[must_use]
    pub fn made_before(self, calls: u32) -> Self {
        self.change(|task| task.before = Some(calls))
    }

    fn change(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        // A task that is in use already keeps what it has; the changed one starts afresh.
        if Arc::get_mut(&mut self.0).is_none() {
            let old = &self.0;
            self = Task(Arc::new(Inner {
                spent: AtomicU32::new(0),
                throttled: AtomicU32::new(0),
                exhausted: AtomicBool::new(false),
                deposited: Default::default(),
                #[cfg(feature = "jittered-retry")]
                given_up: Default::default(),
                #[cfg(feature = "budget")]
                shed: Default::default(),
                failed_at: AtomicUsize::new(0),
                last: Mutex::default(),
                #[cfg(feature = "tool-calls")]
                tool_calls: Mutex::default(),
                #[cfg(feature = "spend")]
                spend: self.heir(),
                ..**old
            }));
        }
        change(Arc::get_mut(&mut self.0).expect("just made, so held once"));
        self
    }

    /// The same with no more than this left of its allowance and its time, and no less than `before` calls
    /// made by others. What it has left never grows, whoever else holds it.
    #[cfg(feature = "attempts")]
    pub(crate) fn narrowed(self, left: Option<u32>, deadline: Option<Instant>, before: Option<u32>) -> Self {
        let own = self.left();
        // A call that came was allowed to come.
        let left = left.map_or(own, |told| told.max(1).min(own));
        let deadline = self.0.deadline.into_iter().chain(deadline).min();
        let before = self.0.before.max(before);
        if (left, deadline, before) == (own, self.0.deadline, self.0.before) {
            return self;
        }
        self.change(|task| {
            task.allowance = task.spent.get_mut().saturating_add(left);
            (task.deadline, task.before) = (deadline, before);
        })
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> Key {
        self.0.id
    }
    /// The agent it belongs to, if it names one.
    #[must_use]
    pub fn caller_key(&self) -> Option<Key> {
        self.0.caller
    }
    /// What it hashes by.
    #[must_use]
    pub fn affinity_key(&self) -> Key {
        self.0.affinity
    }
    /// Its deadline, if it names one.
    #[must_use]
    pub fn deadline_at(&self) -> Option<Instant> {
        self.0.deadline
    }
    /// Its allowance.
    #[must_use]
    pub fn allowance_total(&self) -> u32 {
        self.0.allowance
    }
    /// Whom it makes wait.
    #[must_use]
    pub fn criticality_class(&self) -> Criticality {
        self.0.criticality
    }
    /// Calls that others made for it before it came here; none if nobody told.
    #[must_use]
    pub fn calls_before(&self) -> Option<u32> {
        self.0.before
    }
    /// Failed calls that are left of its allowance.
    #[must_use]
    pub fn left(&self) -> u32 {
        self.0.allowance.saturating_sub(self.spent())
    }
    /// Whether a layer has given up on a call of it: its attempts, its deadline or a budget were used up, or
    /// somebody further in said so. Who answers its caller marks a failure with it, so that nobody
    /// further out sends it again.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.0.exhausted.load(Ordering::Relaxed)
    }
    /// Wire calls that were charged to it so far.
    #[must_use]
    pub fn spent(&self) -> u32 {
        self.0.spent.load(Ordering::Relaxed)
    }
    /// Re-deliveries after a 429 so far; they are not charged to the allowance.
    #[must_use]
    pub fn redelivered(&self) -> u32 {
        self.0.throttled.load(Ordering::Relaxed)
    }

    /// Notes that a layer has given up on a call of it. For retry code that is not ours.
    pub fn give_up(&self) {
        self.0.exhausted.store(true, Ordering::Relaxed);
        #[cfg(feature = "jittered-retry")]
        self.set_given_up(true);
    }
    /// Charges one wire call that failed; the number charged so far.
    pub fn charge(&self) -> u32 {
        self.0.spent.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }
    /// Counts one re-delivery after a 429; the number so far.
    pub fn redeliver(&self) -> u32 {
        self.0.throttled.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Whether the retry budget of this id has not counted the task yet (two stacked retry layers of
    /// one budget, and the repetitions of an outer one, deposit once).
    #[cfg_attr(not(feature = "jittered-retry"), expect(dead_code, reason = "only that layer has a budget"))]
    #[inline]
    pub(crate) fn first_deposit(&self, budget: usize) -> bool {
        if self.0.before.is_some_and(|calls| calls > 0) {
            return false;
        }
        for pot in &self.0.deposited {
            // Read first: a store would take the cache line from the task's other calls.
            let mut known = pot.load(Ordering::Relaxed);
            if known == 0 {
                match pot.compare_exchange(0, budget, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => return true,
                    Err(now) => known = now,
                }
            }
            if known == budget {
                return false;
            }
        }
        false
    }

    /// A retry layer below (or none, for a new call) has returned its last reply for it.
    #[cfg(feature = "jittered-retry")]
    #[inline]
    pub(crate) fn set_given_up(&self, given_up: bool) {
        // Read first: a store would take the cache line from the task's other calls.
        if self.0.given_up.load(Ordering::Relaxed) != given_up {
            self.0.given_up.store(given_up, Ordering::Relaxed);
        }
    }

    /// Whether the reply that just came is the last one of a retry layer below.
    #[cfg(feature = "jittered-retry")]
    pub(crate) fn take_given_up(&self) -> bool {
        self.0.given_up.swap(false, Ordering::Relaxed)
    }

    /// Whether a refusal of a throttle has not been counted yet, for this task, in its present window. (A task
    /// that goes to and fro between more throttles than it remembers is counted again.)
    #[cfg(feature = "budget")]
    pub(crate) fn first_shed(&self, shed: crate::budget::Shed) -> bool {
        let mut place = &self.0.shed[(shed.pack() >> 32) as usize % SHEDS];
        for known in &self.0.shed {
            let packed = known.load(Ordering::Relaxed);
            match shed.is_counted_by(packed) {
                Some(true) => return false,
                Some(false) => place = known,
                None if packed == 0 => place = known,
                None => {}
            }
        }
        place.store(shed.pack(), Ordering::Relaxed);
        true
    }

    /// A call of it at `provider` came to nothing; it may have been executed there.
    #[cfg_attr(not(feature = "hashed-failover"), expect(dead_code, reason = "only a ladder has several"))]
    pub(crate) fn note_provider(&self, provider: &Arc<str>, executed: bool) {
        let mut last = self.0.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.provider = Some(provider.clone());
        if executed {
            last.home = Some(provider.clone());
        }
    }

    /// Its request failed at this rung of a ladder. The first one is remembered: what fails there and then
    /// elsewhere too may be the request's own fault.
    #[cfg_attr(not(feature = "hashed-failover"), expect(dead_code, reason = "only a ladder has several"))]
    pub(crate) fn note_failed(&self, rung: usize) {
        if self.failed_at().is_none() {
            self.0.failed_at.store(rung, Ordering::Relaxed);
        }
    }

    /// It went well after all, or another request of it did: nothing is wrong with it.
    #[cfg_attr(not(feature = "hashed-failover"), expect(dead_code, reason = "only a ladder has several"))]
    pub(crate) fn note_success(&self) {
        // Read first: a store would take the cache line from the task's other calls.
        if self.0.failed_at.load(Ordering::Relaxed) != 0 {
            self.0.failed_at.store(0, Ordering::Relaxed);
        }
    }

    /// The rung at which its request failed first.
    #[inline]
    pub(crate) fn failed_at(&self) -> Option<usize> {
        Some(self.0.failed_at.load(Ordering::Relaxed)).filter(|rung| *rung != 0)
    }

    /// Where its last call that was no success went, if that was through a ladder.
    #[cfg_attr(not(feature = "jittered-retry"), expect(dead_code, reason = "only that layer has a budget"))]
    pub(crate) fn last_provider(&self) -> Option<Arc<str>> {
        self.0.last.lock().unwrap_or_else(PoisonError::into_inner).provider.clone()
    }

    /// The provider at which it may have taken effect.
    #[cfg_attr(not(feature = "hashed-failover"), expect(dead_code, reason = "only a ladder has several"))]
    pub(crate) fn home(&self) -> Option<Arc<str>> {
        self.0.last.lock().unwrap_or_else(PoisonError::into_inner).home.clone()
    }

    /// What it remembers of its tool calls.
    #[cfg(feature = "tool-calls")]
    pub(crate) fn tool_calls(&self) -> std::sync::MutexGuard<'_, crate::tool_calls::state::Memory> {
        self.0.tool_calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether both handles are the same task.
    #[must_use]
    pub fn is(&self, other: &Task) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("id", &self.0.id)
            .field("caller", &self.0.caller)
            .field("affinity", &self.0.affinity)
            .field("deadline", &self.0.deadline)
            .field("allowance", &self.0.allowance)
            .field("criticality", &self.0.criticality)
            .field("spent", &self.spent())
            .finish()
    }
}

/// `time` from now, as far as an instant reaches.
pub(crate) fn far(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(30 * 365 * 24 * 3600))
}

/// What the layers ask of a request.
///
/// [`http::Request`] implements it: the task is an extension, the safety comes from method, key and
/// extension ([`Safety::of_http`]). For a request of your own, `impl HasTask for MyRequest {}` is
/// enough: it then belongs to no task, and is taken for [`Safety::Once`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say which task it belongs to",
    note = "write `impl HasTask for {Self} {{}}`, and its `safety` if it may be sent again"
)]
pub trait HasTask {
    /// The task that this request is a call of.
    fn task(&self) -> Option<&Task> {
        None
    }
    /// Makes it a call of `task`. The default drops it.
    fn set_task(&mut self, task: Task) {
        let _ = task;
    }
    /// What it may suffer.
    fn safety(&self) -> Safety {
        Safety::Once
    }
    /// Whether it is a copy that a retry layer sends again, and of what.
    #[cfg(feature = "jittered-retry")]
    fn resent(&self) -> Option<&crate::retry::Resent> {
        None
    }
    /// Marks it as such a copy. The default drops the mark.
    #[cfg(feature = "jittered-retry")]
    fn set_resent(&mut self, resent: crate::retry::Resent) {
        let _ = resent;
    }
}

#[cfg(feature = "http")]
impl<B> HasTask for http::Request<B> {
    #[inline]
    fn task(&self) -> Option<&Task> {
        self.extensions().get()
    }
    fn set_task(&mut self, task: Task) {
        self.extensions_mut().insert(task);
    }
    #[inline]
    fn safety(&self) -> Safety {
        Safety::of_http(self)
    }
    #[cfg(feature = "jittered-retry")]
    #[inline]
    fn resent(&self) -> Option<&crate::retry::Resent> {
        self.extensions().get()
    }
    #[cfg(feature = "jittered-retry")]
    fn set_resent(&mut self, resent: crate::retry::Resent) {
        self.extensions_mut().insert(resent);
    }
}

macro_rules! no_task {
    ($($request:ty),*) => { $(impl HasTask for $request {})* };
}
no_task!(
    (),
    bool,
    char,
    u8,
    u16,
    u32,
    u64,
    u128,
    usize,
    i8,
    i16,
    i32,
    i64,
    i128,
    isize,
    f32,
    f64,
    String,
    &str
);

impl<T: HasTask + ?Sized> HasTask for Box<T> {
    fn task(&self) -> Option<&Task> {
        (**self).task()
    }
    fn set_task(&mut self, task: Task) {
        (**self).set_task(task);
    }
    fn safety(&self) -> Safety {
        (**self).safety()
    }
    #[cfg(feature = "jittered-retry")]
    fn resent(&self) -> Option<&crate::retry::Resent> {
        (**self).resent()
    }
    #[cfg(feature = "jittered-retry")]
    fn set_resent(&mut self, resent: crate::retry::Resent) {
        (**self).set_resent(resent);
    }
}

/// An id that no other task of this process has, and very likely none of another.
pub(crate) fn fresh_id(seeds: &crate::random::Seeds) -> Key {
    Key(mix(seeds.session().bits()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_stable_across_versions() {
        // Fixed by the published test vectors of XXH3: a change here would move every task of a fleet.
        assert_eq!(Key::from("").get(), 0x2d06_8005_38d3_94c2);
        assert_eq!(Key::from("task").get(), Key::from(b"task".as_slice()).get());
        assert_eq!(Key::from(7).get(), 7);
    }

    #[test]
    fn clones_share_what_they_spend() {
        let task = Task::new(1).allowance(5);
        let clone = task.clone();
        assert_eq!((clone.charge(), task.charge(), clone.spent()), (1, 2, 2));
        assert!(task.is(&clone));
        let other = clone.allowance(2);
        assert!(!task.is(&other));
        assert_eq!((other.spent(), other.allowance_total(), task.allowance_total()), (0, 2, 5));
    }

    #[tokio::test(start_paused = true)]
    async fn setters_set() {
        let task = Task::new("t")
            .caller("a")
            .affinity("chat")
            .deadline_in(Duration::MAX)
            .criticality(Criticality::Batch);
        assert_eq!(task.caller_key(), Some("a".into()));
        assert_eq!(task.affinity_key(), "chat".into());
        assert!(task.deadline_at().unwrap() > Instant::now());
        assert_eq!(task.criticality_class(), Criticality::Batch);
        assert_eq!(Task::new("t").affinity_key(), Task::new("t").id());
        assert_eq!(Task::new("t").allowance(0).allowance_total(), 1);
    }
}
