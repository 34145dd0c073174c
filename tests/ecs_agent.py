"""Stand-in for the ECS agent's endpoint for task scale-in protection."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast

from ray_on_ecs.node.protection import EXPIRES_MINUTES

PROTECT = {"ProtectionEnabled": True, "ExpiresInMinutes": EXPIRES_MINUTES}
RELEASE = {"ProtectionEnabled": False}
TASK = "arn:aws:ecs:us-west-2:123456789012:task/ray/1"
# The agent's answers, by AWS's documentation of the endpoint and the agent's source.
SET = {"protection": {"ExpirationDate": "2026-10-06T02:29:16Z", "ProtectionEnabled": True, "TaskArn": TASK}}
BLOCKED = {"failure": {"Arn": TASK, "Detail": None, "Reason": "DEPLOYMENT_BLOCKED"}}
DENIED = {"requestID": "1", "error": {"Arn": TASK, "Code": "AccessDeniedException", "Message": "not authorized"}}


class Agent(HTTPServer):
    """Records what is put to the endpoint and answers with `status` and `answer`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.answer = 200, json.dumps(SET)
        self.loses_answers = False
        self.put: list[tuple[str, dict[str, Any]]] = []

    @property
    def states(self) -> list[dict[str, Any]]:
        return [state for _, state in self.put]

    def fail(self, status: int, answer: object) -> None:
        self.status, self.answer = status, answer if isinstance(answer, str) else json.dumps(answer)


class Handler(BaseHTTPRequestHandler):
    """Answers as ECS's agent does."""

    def do_PUT(self) -> None:
        agent = cast(Agent, self.server)
        agent.put.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        assert "Authorization" not in self.headers
        if agent.loses_answers:
            return
        self.send_response(agent.status)
        self.end_headers()
        self.wfile.write(agent.answer.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the tests say what went wrong."""
