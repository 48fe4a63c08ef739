//! The shipped Lua function on a redis-server of our own, under a clock that the world moves.

use redis::Connection;
use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};
use tower_herd::store::{Grant, HolderId, Report};

const LEASE: &str = include_str!("../../src/lease.lua");
const KEY: &str = "herd:v1:{llm}";

/// Only `redis` is another for the function: `TIME` is `ARGV[5]`, in milliseconds, and what it publishes is handed
/// back.
const PRELUDE: &str = "
local real, published = redis, ''
local redis = setmetatable({ call = function(command, ...)
    if command == 'TIME' then
        return { tostring(math.floor(ARGV[5] / 1000)), tostring(ARGV[5] % 1000 * 1000) }
    elseif command == 'publish' then
        published = select(2, ...)
        return 0
    end
    return real.call(command, ...)
end }, { __index = real })
local function step()
";
const POSTLUDE: &str = "
end
local answer = step()
return { answer, published }
";

/// A rule of the function that is left out, to see that the check would notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The store lowers what a holder is charged to its target by itself, as doorman does.
    AcknowledgedShrink,
    /// A silence, or a step of the clock, is taken for granted.
    GapGuard,
    /// A lost book begins as if it were the first.
    Learning,
    /// A report that comes late, or twice, is taken for a new one.
    Seq,
}

impl Left {
    /// What stands in the function, and what in its place.
    fn patch(self) -> (&'static str, &'static str) {
        match self {
            Left::AcknowledgedShrink => (
                "    if min(a.target, a.need) > r[CHARGE] then lack[#lack + 1] = a end\n",
                "    if r[CHARGE] > a.target then
                   sums.charge = sums.charge - (r[CHARGE] - a.target)
                   r[CHARGE] = a.target
                   dirty[a.id] = true
                 end
                 if min(a.target, a.need) > r[CHARGE] then lack[#lack + 1] = a end\n",
            ),
            Left::GapGuard => ("local jumped = passed > gap_most or back > STEP\n", "local jumped = false\n"),
            Left::Learning => (
                "began = now, learn_until = now + learning_time, hard = true,\n",
                "began = now, learn_until = now, hard = false,\n",
            ),
            Left::Seq => ("local stale = own and report.seq <= before or false\n", "local stale = false\n"),
        }
    }
}

/// A redis-server in a directory of its own.
struct Server {
    child: Child,
    directory: PathBuf,
}

impl Server {
    fn start(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("herd-model-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a temporary directory");
        let child = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(directory.join("s"))
            .arg("--pidfile")
            .arg(directory.join("redis.pid"))
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server (Debian: apt-get install redis-server)");
        Server { child, directory }
    }

    fn connect(&self) -> Connection {
        let url = format!("redis+unix://{}", self.directory.join("s").display());
        let client = redis::Client::open(url).expect("an address");
        for _ in 0..500 {
            if let Ok(connection) = client.get_connection() {
                return connection;
            }
            #[expect(clippy::disallowed_methods, reason = "a real server starts in real time")]
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("redis-server does not answer on {}", self.directory.display());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_dir_all(&self.directory).ok();
    }
}

/// Who is to exchange at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Woken {
    All,
    These(Vec<HolderId>),
}

/// The book on the server.
///
/// Its connection is a blocking one: no virtual time goes by while the server works.
pub struct Store {
    connection: Connection,
    script: redis::Script,
    _server: Server,
}

impl Store {
    pub fn start(name: &str, without: Option<Left>) -> Self {
        let mut text = LEASE.to_owned();
        if let Some(left) = without {
            let (from, to) = left.patch();
            assert_eq!(
                text.matches(from).count(),
                1,
                "{left:?}: the function has changed, the patch has not"
            );
            text = text.replace(from, to);
        }
        let server = Server::start(name);
        let script = redis::Script::new(&format!("{PRELUDE}{text}{POSTLUDE}"));
        Store { connection: server.connect(), script, _server: server }
    }

    /// One step, at this time of the server's clock, in this life of it.
    pub fn exchange(&mut self, clock: u64, run: u64, report: &Report) -> (Grant, Woken) {
        let report = serde_json::to_string(report).expect("a report");
        let (grant, woken): (String, String) = self
            .script
            .key(KEY)
            .arg(report)
            .arg("channel")
            .arg(format!("run{run}"))
            .arg("publish")
            .arg(clock)
            .invoke(&mut self.connection)
            .unwrap_or_else(|error| panic!("the function failed: {error}"));
        let grant = serde_json::from_str(&grant).unwrap_or_else(|error| panic!("{error}: {grant}"));
        let woken = match woken.as_str() {
            "*" => Woken::All,
            "" => Woken::These(Vec::new()),
            ids => Woken::These(ids.split(',').map(|id| id.parse().expect("an id")).collect()),
        };
        (grant, woken)
    }

    pub fn flush(&mut self) {
        redis::cmd("FLUSHALL").exec(&mut self.connection).expect("FLUSHALL");
    }

    /// The book as a replica may have it.
    pub fn dump(&mut self) -> Option<Vec<u8>> {
        redis::cmd("DUMP").arg(KEY).query(&mut self.connection).expect("DUMP")
    }

    pub fn restore(&mut self, copy: Option<&[u8]>) {
        self.flush();
        if let Some(copy) = copy {
            redis::cmd("RESTORE").arg(KEY).arg(0).arg(copy).exec(&mut self.connection).expect("RESTORE");
        }
    }
}
