"""The only package that sends requests to the API server.

`client` sends the requests and returns undecoded bytes. `reflector` keeps the objects of one resource in memory.
`ledger_store` stores the ledgers, which record the GPU quota that each namespace uses. `team_store`
stores the ledgers of teams.

The official ``kubernetes`` client provides configuration, authentication and transport. The typed models of that client
are not used, because they make decoding seventy times slower and drop unknown fields.
"""

from vcuda.kube.authorization import AuthorizerGrace
from vcuda.kube.client import JSON_PATCH, MERGE_PATCH, Heard, Kube, Stream, segment, upsert
from vcuda.kube.connection import Params, VersionCheck, end_process
from vcuda.kube.dra import CLAIMS, ClaimPolicies, DeviceInformer, ServedWatches, is_served
from vcuda.kube.events import Event, InvolvedObject, post_event, post_event_or_log
from vcuda.kube.informers import NodeInformer, QuotaInformer, QuotaSource, RuntimeClassInformer
from vcuda.kube.ledger_marks import OPENING_SECONDS
from vcuda.kube.ledger_store import NOT_TRACKED, TEAM_PREFIX, LedgerStore, NamedLedger, Stored, ledger_name
from vcuda.kube.objects import living_pods, namespace_names
from vcuda.kube.pages import Page
from vcuda.kube.reflector import Backoff, OnEvent, Reflector
from vcuda.kube.store import ReflectorCounts
from vcuda.kube.team_store import NamedTeam, StoredTeam, TeamMap, TeamStore, team_ledger_name
from vcuda.kube.watch import Key
