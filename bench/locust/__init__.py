"""Realistic users for locust: locust -f bench/locust/mixed.py --headless -u 200 -r 20 -t 60s --host URL"""
