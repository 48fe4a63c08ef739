//! One connection to one server, made anew when it is lost.

use crate::{
    config::RedisConfig,
    error::{Verdict, is_denied, timed_out, verdict},
};
use redis::{
    AsyncConnectionConfig, Client, PushInfo, PushKind, RedisError, RedisResult, Value,
    aio::MultiplexedConnection, cmd, sentinel::SentinelClient,
};
use std::{
    collections::HashMap,
    fmt,
    hash::BuildHasher,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{mpsc::UnboundedSender, watch},
    time::{Instant, timeout, timeout_at},
};

/// The wait before a third attempt in a row; doubled for each further one.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait between two attempts. Well below the time for which a lease outlives its last renewal.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// Whom to connect to.
pub(crate) enum Target {
    Node(Client),
    Sentinel { client: tokio::sync::Mutex<SentinelClient>, sentinels: u32 },
}

/// What a connection is for.
#[derive(Clone)]
pub(crate) enum Purpose {
    /// Exchanges, whose script wants to know the server's run.
    Book,
    /// What is published comes here.
    Wakes(UnboundedSender<PushInfo>),
    Other,
}

/// A connection, made when it is first asked for, on the runtime of who asks. A handle.
///
/// It is made in a task of its own, so that an exchange waits for no longer than it has time, and the next one finds
/// what came of it.
#[derive(Clone)]
pub(crate) struct Link(Arc<Inner>);

struct Inner {
    target: Target,
    cluster: bool,
    connect_timeout: Duration,
    /// For an answer.
    patience: Duration,
    purpose: Purpose,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    // Connections and attempts that failed since the last answer.
    failures: u32,
    // Since when the connection owes an answer. Whoever asks may give up before us, and would not notice that it is
    // dead.
    silent: Option<Instant>,
    random: fastrand::Rng,
}

enum Phase {
    Idle,
    /// The other end is dropped at the end of the attempt, however it ends.
    Connecting(watch::Receiver<()>),
    Up(Ready),
    Waiting {
        until: Instant,
        error: RedisError,
    },
}

/// A connection that works, as far as is known.
#[derive(Clone)]
pub(crate) struct Ready {
    /// Unlike any other of this process.
    pub(crate) id: u64,
    pub(crate) connection: MultiplexedConnection,
    pub(crate) server: Arc<Server>,
}

/// What is known of the server at its other end.
#[derive(Debug, Default)]
pub(crate) struct Server {
    pub(crate) run: Run,
    /// 7 for Redis 7.0.15 and Valkey 7.2; 0: it does not say.
    pub(crate) major: u32,
    pub(crate) cluster: bool,
    /// Of its cluster.
    pub(crate) ranges: Vec<Range>,
    /// They are in the table.
    pub(crate) learned: AtomicBool,
}

/// Slots, and the nodes that have them, as `host:port`; the primary first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) nodes: Vec<String>,
}

/// Where the script learns which life of which server it runs in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Run {
    /// It asks itself.
    #[default]
    Inside,
    /// It may not ask; we could, when the connection was made.
    Known(String),
    /// Nobody may ask.
    Unknown,
}

impl Run {
    /// As an argument of the script.
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Run::Inside => "",
            Run::Known(id) => id,
            Run::Unknown => "none",
        }
    }
}

impl Server {
    /// A message that is published in a shard stays there.
    pub(crate) fn shards_channels(&self) -> bool {
        self.cluster && self.major >= 7
    }
}

impl Link {
    pub(crate) fn new(target: Target, cluster: bool, config: &RedisConfig, purpose: Purpose) -> Self {
        let (connect_timeout, patience) = (config.connect_timeout, config.response_timeout);
        let random = fastrand::Rng::with_seed(entropy());
        let state = Mutex::new(State { phase: Phase::Idle, failures: 0, silent: None, random });
        Link(Arc::new(Inner { target, cluster, connect_timeout, patience, purpose, state }))
    }

    /// The connection, once it is there. Fails at once while the wait after a failed attempt lasts.
    pub(crate) async fn ready(&self, deadline: Instant) -> RedisResult<Ready> {
        loop {
            let mut end = match self.0.step() {
                Step::Ready(ready) => return Ok(ready),
                Step::Failed(error) => return Err(error),
                Step::Connecting(end) => end,
                Step::Start(start, end) => {
                    tokio::spawn(connect(self.0.clone(), start));
                    end
                }
            };
            // Always an error: nothing is ever sent.
            if timeout_at(deadline, end.changed()).await.is_err() {
                return Err(timed_out());
            }
        }
    }

    /// Runs something on the connection, and learns from its error what becomes of that.
    pub(crate) async fn run<T>(
        &self,
        ready: &Ready,
        deadline: Instant,
        what: impl Future<Output = RedisResult<T>>,
    ) -> RedisResult<T> {
        let began = Instant::now();
        self.0.sent(ready.id, began);
        let result = timeout_at(deadline, what).await.unwrap_or_else(|_| Err(timed_out()));
        match &result {
            Ok(_) => self.0.answered(ready.id),
            // Some of the time went by while this connection was made: that says nothing against it.
            Err(error)
                if error.is_timeout()
                    && deadline.saturating_duration_since(began) < self.0.patience / 10 * 9 => {}
            Err(error) if verdict(error) == Verdict::Replace => self.0.lost(ready.id, error),
            Err(_) => self.0.answered(ready.id),
        }
        result
    }

    /// Makes a new connection for the next who asks.
    pub(crate) fn replace(&self) {
        let mut state = self.0.lock();
        if let Phase::Up(_) = state.phase {
            state.phase = Phase::Idle;
        }
    }
}

enum Step {
    Ready(Ready),
    Failed(RedisError),
    Connecting(watch::Receiver<()>),
    Start(watch::Sender<()>, watch::Receiver<()>),
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self) -> Step {
        let mut state = self.lock();
        if let (Phase::Up(_), Some(since)) = (&state.phase, state.silent)
            && since.elapsed() >= self.patience
        {
            state.lost(&timed_out());
        }
        match &state.phase {
            Phase::Up(ready) => return Step::Ready(ready.clone()),
            Phase::Waiting { until, error } if Instant::now() < *until => return Step::Failed(error.clone()),
            // An attempt whose runtime has gone never ends, but its end of the channel is dropped.
            Phase::Connecting(end) if end.has_changed().is_ok() => return Step::Connecting(end.clone()),
            Phase::Idle | Phase::Waiting { .. } | Phase::Connecting(_) => {}
        }
        let (start, end) = watch::channel(());
        state.phase = Phase::Connecting(end.clone());
        Step::Start(start, end)
    }

    fn lost(&self, id: u64, error: &RedisError) {
        let mut state = self.lock();
        if state.is_up(id) {
            state.lost(error);
        }
    }

    fn sent(&self, id: u64, now: Instant) {
        let mut state = self.lock();
        if state.is_up(id) {
            state.silent.get_or_insert(now);
        }
    }

    fn answered(&self, id: u64) {
        let mut state = self.lock();
        if state.is_up(id) {
            state.silent = None;
            state.failures = 0;
        }
    }
}

impl State {
    fn is_up(&self, id: u64) -> bool {
        matches!(&self.phase, Phase::Up(ready) if ready.id == id)
    }

    fn lost(&mut self, error: &RedisError) {
        tracing::debug!(error = %error, "the connection to the fleet's store is lost");
        self.failures = self.failures.saturating_add(1);
        self.phase = match self.failures {
            // A connection that did work is replaced at once.
            1 => Phase::Idle,
            failures => {
                Phase::Waiting { until: Instant::now() + self.wait(failures - 1), error: error.clone() }
            }
        };
    }

    /// Capped, and spread over the upper half: at the cap too, not all come at once.
    fn wait(&mut self, failures: u32) -> Duration {
        let doubled = FIRST_WAIT.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LAST_WAIT);
        let millis = doubled.as_secs_f64() * (0.5 + 0.5 * self.random.f64());
        Duration::try_from_secs_f64(millis).unwrap_or(doubled)
    }
}

async fn connect(inner: Arc<Inner>, end: watch::Sender<()>) {
    let patience = match &inner.target {
        Target::Node(_) => inner.connect_timeout,
        // Each of them may be one that does not answer; then the server is asked for its role, and connected to.
        Target::Sentinel { sentinels, .. } => {
            inner.connect_timeout.saturating_mul(sentinels.saturating_add(2))
        }
    };
    let result = timeout(patience, attempt(&inner)).await.unwrap_or_else(|_| Err(timed_out()));
    let mut state = inner.lock();
    state.phase = match result {
        Ok(ready) => {
            state.silent = None;
            Phase::Up(ready)
        }
        Err(error) => {
            tracing::debug!(error = %error, "no connection to the fleet's store");
            state.failures = state.failures.saturating_add(1);
            let failures = state.failures;
            Phase::Waiting { until: Instant::now() + state.wait(failures), error }
        }
    };
    drop(state);
    drop(end);
}

async fn attempt(inner: &Arc<Inner>) -> RedisResult<Ready> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let pushes = match &inner.purpose {
        Purpose::Wakes(pushes) => Some(pushes.clone()),
        Purpose::Book | Purpose::Other => None,
    };
    // The connection's task must not keep the connection.
    let weak: Weak<Inner> = Arc::downgrade(inner);
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(inner.connect_timeout))
        .set_response_timeout(None)
        .set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection
                && let Some(inner) = weak.upgrade()
            {
                inner.lost(id, &std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
            }
            match &pushes {
                Some(pushes) => pushes.send(push).map_err(drop),
                None => Ok(()),
            }
        });
    let mut connection = match &inner.target {
        Target::Node(client) => client.get_multiplexed_async_connection_with_config(&config).await?,
        Target::Sentinel { client, .. } => {
            client.lock().await.get_async_connection_with_config(&config).await?
        }
    };
    let server = Arc::new(greet(&mut connection, inner.cluster, &inner.purpose).await?);
    Ok(Ready { id, connection, server })
}

/// Which kind of server it is, and what we may do there.
async fn greet(
    connection: &mut MultiplexedConnection,
    cluster: bool,
    purpose: &Purpose,
) -> RedisResult<Server> {
    let hello: HashMap<String, Value> = cmd("HELLO").query_async(connection).await?;
    let text = |name: &str| {
        hello
            .get(name)
            .and_then(|value| redis::from_redis_value_ref::<String>(value).ok())
            .unwrap_or_default()
    };
    let major = text("version").split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
    let run = match purpose {
        Purpose::Book => run(connection).await?,
        Purpose::Wakes(_) | Purpose::Other => Run::default(),
    };
    let mut server = Server { run, major, cluster, ranges: Vec::new(), learned: AtomicBool::new(false) };
    if cluster {
        // Not needed: whoever is asked tells where a key is. But a node that dies tells nothing, and then others
        // must be known.
        match cmd("CLUSTER").arg("SLOTS").query_async::<Value>(connection).await {
            Ok(slots) => server.ranges = ranges(&slots),
            Err(error) if error.code().is_some() => {
                tracing::debug!(error = %error, "the cluster does not tell its nodes");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(server)
}

async fn run(connection: &mut MultiplexedConnection) -> RedisResult<Run> {
    const ASK: &str = "return redis.pcall('INFO', 'server')";
    // A server that says nothing of its run, or does not let us ask.
    let asked = |answer: RedisResult<String>| match answer {
        Ok(info) => Ok(info.lines().find_map(|line| line.trim().strip_prefix("run_id:").map(str::to_owned))),
        Err(error) if is_denied(&error) || error.code() == Some("ERR") => Ok(None),
        Err(error) => Err(error),
    };
    if asked(cmd("EVAL").arg(ASK).arg(0).query_async(connection).await)?.is_some() {
        return Ok(Run::Inside);
    }
    if let Some(id) = asked(cmd("INFO").arg("server").query_async(connection).await)? {
        return Ok(Run::Known(id));
    }
    tracing::warn!(
        "the fleet's store does not tell its run id (it needs the right to INFO): after a failover the ceiling may be exceeded"
    );
    Ok(Run::Unknown)
}

/// The answer to `CLUSTER SLOTS`: `[[first, last, [host, port, id, ...], ...], ...]`. A node without a known host is
/// left out; a range whose primary is one, too.
fn ranges(slots: &Value) -> Vec<Range> {
    let node = |node: &Value| {
        let [host, port, ..] = node.as_sequence()? else { return None };
        let host: String = redis::from_redis_value_ref(host).ok()?;
        let port: u16 = redis::from_redis_value_ref(port).ok()?;
        (!host.is_empty() && host != "?").then(|| format!("{host}:{port}"))
    };
    let range = |range: &Value| {
        let [first, last, primary, replicas @ ..] = range.as_sequence()? else { return None };
        let mut nodes = vec![node(primary)?];
        nodes.extend(replicas.iter().filter_map(node));
        let (first, last) =
            (redis::from_redis_value_ref(first).ok()?, redis::from_redis_value_ref(last).ok()?);
        Some(Range { first, last, nodes })
    };
    slots
        .as_sequence()
        .unwrap_or_default()
        .iter()
        .filter_map(range)
        .filter(|range| range.last < 16_384)
        .collect()
}

/// Must differ in every process; no run is replayed with real servers.
#[expect(clippy::disallowed_types, reason = "this one must differ in every process")]
pub(crate) fn entropy() -> u64 {
    std::hash::RandomState::new().hash_one(0x6865_7264_u64)
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.lock().phase {
            Phase::Idle => "idle",
            Phase::Connecting(_) => "connecting",
            Phase::Up(_) => "up",
            Phase::Waiting { .. } => "waiting",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_between_attempts_double_up_to_two_seconds_and_are_spread() {
        let mut state =
            State { phase: Phase::Idle, failures: 0, silent: None, random: fastrand::Rng::with_seed(1) };
        for (failures, most) in
            [(1, 50), (2, 100), (3, 200), (6, 1600), (7, 2000), (40, 2000), (u32::MAX, 2000)]
        {
            let most = Duration::from_millis(most);
            let waits: Vec<_> = (0..100).map(|_| state.wait(failures)).collect();
            assert!(waits.iter().all(|wait| *wait >= most / 2 && *wait <= most), "{failures}: {waits:?}");
            let spread = waits.iter().max().unwrap().saturating_sub(*waits.iter().min().unwrap());
            assert!(spread > most / 4, "{failures}: {spread:?}");
        }
    }

    #[test]
    fn the_nodes_of_a_cluster_are_read_and_what_is_no_address_is_left_out() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let node = |host: Value, port: i64| Value::Array(vec![host, Value::Int(port), text("id")]);
        let range = |first, last, nodes: Vec<Value>| {
            Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat())
        };
        let slots = Value::Array(vec![
            range(
                0,
                99,
                vec![node(text("10.0.0.2"), 6379), node(text("10.0.0.1"), 6379), node(Value::Nil, 6379)],
            ),
            range(100, 199, vec![node(text("?"), 6379), node(text("10.0.0.1"), 6379)]),
            range(200, 99_999, vec![node(text("10.0.0.1"), 6379)]),
            range(200, 20_000, vec![node(text("10.0.0.1"), 6379)]),
            range(200, 299, vec![]),
            Value::Int(3),
        ]);
        let nodes = vec!["10.0.0.2:6379".to_owned(), "10.0.0.1:6379".to_owned()];
        assert_eq!(ranges(&slots), [Range { first: 0, last: 99, nodes }]);
        assert!(ranges(&Value::Nil).is_empty());
    }
}
